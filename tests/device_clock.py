"""A clock that behaves as that of a GPU: marks are reached later than they are made, and then have a time."""

from __future__ import annotations

from paceline.measure.clock import Clock, CpuMark, Mark


class DeviceClock(Clock):
    """Clock of a device that reaches each mark one second after the one before; `reach` says how far it has come."""

    on_host = False

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.reached = 0
        self.released: list[int] = []
        self.waits: list[int] = []

    def mark(self) -> int:
        self.made += 1
        return self.made

    def cpu_mark(self) -> CpuMark:
        return self.mark(), float("nan")

    def wait(self, mark: Mark) -> None:
        self.waits.append(mark)
        self.reached = max(self.reached, mark)

    def has_reached(self, mark: Mark) -> bool:
        return bool(mark <= self.reached)

    def read(self, mark: Mark) -> float:
        assert mark <= self.reached, "a GPU cannot tell the time of an event that it has not reached"
        return float(mark)

    def release(self, mark: Mark) -> None:
        self.released.append(mark)
