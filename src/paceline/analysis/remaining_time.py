"""Remaining time of a run or an experiment as a range: from a guess at first, then from what has been measured.

The work consists of parts, such as starting ranks or one run of a candidate. A part that was measured is expected to
take as long again. A part that was not is scaled by parts of the same kind, or by all that was measured. The range
therefore narrows as parts end, and follows the load of the machine. Errors of different kinds of parts are independent,
so that they are added in squares.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from paceline.records.events import EstimateEvent

PartKind = Literal["launch", "examination", "proof", "run", "step", "evaluation"]

GUESSED = 2.0
"""Factor by which a kind of parts may be faster or slower than its guess, relative to other kinds."""
TRIED = 1.5
"""The same for kinds whose guess is computed from a trial on this machine."""
TRIED_KINDS: tuple[PartKind, ...] = ("proof", "run")
MACHINE = 1.7
"""Factor by which a machine that does nothing else may be faster or slower than the guesses assume, in all parts."""
LIKE_OTHERS = 1.5
"""Factor by which a part may differ from others of its kind, relative to the guesses of both."""
UNLIKE_OTHERS = 5.0
"""The same without guesses: strategies differ in their time."""
FIRST_MEASUREMENT = 1.0
"""Relative uncertainty of one measurement; that of n measurements is n times smaller."""
LOWEST_UNCERTAINTY = 0.1
"""Relative uncertainty that remains after many measurements, since the load of a machine changes."""
OVERDUE = 0.5
"""Further time of a part that takes longer than expected, relative to the time so far."""
LAUNCH_END = 0.2
"""Largest share of the time of a launch that comes after its last run: ranks disconnect and exit."""


@dataclass(frozen=True)
class Part:
    """Kind of work that may occur several times, such as a run of one candidate."""

    kind: PartKind
    name: str = ""
    """Candidate, or the shape of a launch."""


@dataclass(frozen=True)
class RemainingTime:
    """Estimated time until the end, in seconds."""

    low_s: float
    high_s: float
    """`low_s` to `high_s` is the range for the least number of repeats."""
    most_s: float
    """Upper end for the largest number of repeats."""

    def to_event(self) -> EstimateEvent:
        """Return the estimate as an event of the experiment."""
        return EstimateEvent(low_s=self.low_s, high_s=self.high_s, most_s=self.most_s)


@dataclass(frozen=True)
class _PartTime:
    """Expected seconds of a part, and how far off they may be.

    A guess may be wrong by a factor, which is about the same for all parts of a kind, and has nothing to do with that
    of other kinds. The speed and the load of the machine affect all parts alike.
    """

    seconds: float
    low_s: float
    high_s: float
    """`low_s` to `high_s` is the range at the expected speed of the machine."""
    less_load_s: float = 0.0
    """Seconds that the part may be faster, since the machine is faster or less busy."""
    more_load_s: float = 0.0
    """Seconds that the part may be slower, since the machine is slower or busier."""

    def after(self, elapsed_s: float) -> _PartTime:
        """Return the rest of a part that has run for some time; a part that is overdue takes some more time."""
        most_s = self.high_s + self.more_load_s
        if elapsed_s > most_s:
            return _PartTime(0.0, 0.0, OVERDUE * elapsed_s)  # It may end at any time.
        seconds, low_s, high_s = (max(0.0, end_s - elapsed_s) for end_s in (self.seconds, self.low_s, self.high_s))
        more_load_s = min(self.more_load_s, most_s - elapsed_s)
        return _PartTime(seconds, low_s, high_s, min(self.less_load_s, seconds), more_load_s)


class _Sum:
    """Sum of expected seconds: errors add up within a kind and for the load, and in squares between kinds."""

    def __init__(self) -> None:
        self._seconds = self._less_load_s = self._more_load_s = 0.0
        self._below: dict[PartKind, float] = {}
        self._above: dict[PartKind, float] = {}

    def add(self, kind: PartKind, expected: _PartTime, times: int) -> None:
        self._seconds += times * expected.seconds
        self._below[kind] = self._below.get(kind, 0.0) + times * (expected.seconds - expected.low_s)
        self._above[kind] = self._above.get(kind, 0.0) + times * (expected.high_s - expected.seconds)
        self._less_load_s += times * expected.less_load_s
        self._more_load_s += times * expected.more_load_s

    @property
    def low_s(self) -> float:
        return max(0.0, self._seconds - math.hypot(self._less_load_s, *self._below.values()))

    @property
    def high_s(self) -> float:
        return self._seconds + math.hypot(self._more_load_s, *self._above.values())


@dataclass
class _Launch:
    """Launch in progress."""

    stage: str
    part: Part
    runs: Sequence[Part]
    boundaries: Callable[[], Sequence[float | None]]
    began_s: float
    ended_runs: int = 0


class TimeEstimator:
    """Estimate of the remaining time; the engine reports what happens, displays ask for `remaining` from any thread.

    `guesses` has the expected seconds of parts before anything is measured, and `slowdowns` the factors by which the
    present load of the machine may lengthen them, 1 for parts that are missing. Without guesses there is no estimate
    until one part of each kind was measured. `clock` returns seconds, on the same clock as the boundaries of a launch.
    """

    def __init__(
        self,
        guesses: Mapping[Part, float] | None = None,
        slowdowns: Mapping[Part, float] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._guesses = dict(guesses or {})
        self._slowdowns = dict(slowdowns or {})
        self._clock = clock
        self._measured: dict[Part, list[float]] = {}
        self._expected: dict[str, dict[Part, tuple[int, int]]] = {}
        self._launch: _Launch | None = None
        self._lock = threading.RLock()

    def expect(self, stage: str, parts: Iterable[Part], least: int = 1, most: int = 1) -> None:
        """Set the parts that a stage still has to carry out; each occurs from `least` to `most` times."""
        with self._lock:
            self._expected[stage] = {
                part: (number * least, number * most) for part, number in Counter(parts).items() if most
            }

    def leave_out(self, name: str) -> None:
        """Expect no further proofs and runs of a candidate, for example after it failed."""
        with self._lock:
            for parts in self._expected.values():
                for part in (Part("proof", name), Part("run", name)):
                    parts.pop(part, None)

    def guess(self, part: Part, seconds: float) -> None:
        """Set the expected seconds of a part that has no guess yet."""
        with self._lock:
            self._guesses.setdefault(part, seconds)

    def measure(self, part: Part, seconds: float) -> None:
        """Add the measured seconds of a part."""
        with self._lock:
            self._measured.setdefault(part, []).append(seconds)

    def forget(self, part: Part) -> None:
        """Remove the measurements of a part, for example those of warm-up steps."""
        with self._lock:
            self._measured.pop(part, None)

    @contextmanager
    def launched(
        self, stage: str, part: Part, runs: Sequence[Part], boundaries: Callable[[], Sequence[float | None]]
    ) -> Iterator[None]:
        """Measure a launch and its runs while the context is open.

        `boundaries` returns the times at which the ranks were ready and at which each run so far has ended. The first
        is None if it is unknown; the first run then includes the start of the ranks.
        """
        with self._lock:
            self._launch = _Launch(stage, part, runs, boundaries, self._clock())
        try:
            yield
            self._end_launch()
        finally:
            with self._lock:
                self._catch_up()
                self._launch = None

    def remaining(self) -> RemainingTime | None:
        """Return the time until the end of all stages; None while nothing is known about some of the parts."""
        with self._lock:
            self._catch_up()
            least, most = _Sum(), _Sum()
            current = self._rest_of_launch()
            for stage, parts in self._expected.items():
                for part, (least_times, most_times) in parts.items():
                    each = self._time_of(part)
                    if each is None:
                        return None
                    rest = current.pop((stage, part), None)
                    for total, times in ((least, least_times), (most, most_times)):
                        begun = int(rest is not None and times > 0)
                        total.add(part.kind, each, times - begun)
                        if rest is not None:
                            total.add(part.kind, rest, begun)
            return RemainingTime(least.low_s, least.high_s, most.high_s)

    def _catch_up(self) -> None:
        """Measure the runs of the current launch that have ended since the last call."""
        launch = self._launch
        if launch is None:
            return
        times = self._times(launch)
        for number in range(launch.ended_runs, min(len(times) - 1, len(launch.runs))):
            self.measure(launch.runs[number], max(0.0, times[number + 1] - times[number]))
            self._take(launch.stage, launch.runs[number])
            launch.ended_runs += 1

    def _end_launch(self) -> None:
        with self._lock:
            self._catch_up()
            assert self._launch is not None
            times = self._times(self._launch)
            if times:
                around_s = (times[0] - self._launch.began_s) + (self._clock() - times[-1])
                self.measure(self._launch.part, max(0.0, around_s))
            self._take(self._launch.stage, self._launch.part)

    @staticmethod
    def _times(launch: _Launch) -> list[float]:
        return [launch.began_s if at is None else at for at in launch.boundaries()]

    def _take(self, stage: str, part: Part) -> None:
        """Expect a part once less."""
        parts = self._expected.get(stage, {})
        least, most = parts.get(part, (0, 0))
        parts[part] = (max(0, least - 1), max(0, most - 1))
        if parts[part] == (0, 0):
            del parts[part]

    def _rest_of_launch(self) -> dict[tuple[str, Part], _PartTime]:
        """Return the time that the launch in progress and its current run still take, by stage and part."""
        launch = self._launch
        start = None if launch is None else self._time_of(launch.part)
        if launch is None or start is None:
            return {}
        times, now = self._times(launch), self._clock()
        if not times:
            return {(launch.stage, launch.part): start.after(max(0.0, now - launch.began_s))}
        rest = {(launch.stage, launch.part): _PartTime(0.0, 0.0, LAUNCH_END * start.high_s)}
        if launch.ended_runs < len(launch.runs):
            run = launch.runs[launch.ended_runs]
            current = self._time_of(run)
            if current is not None:
                rest[launch.stage, run] = current.after(max(0.0, now - times[-1]))
        return rest

    def _time_of(self, part: Part) -> _PartTime | None:
        """Return the expected seconds of a part; None if nothing is known about its kind."""
        own = self._measured.get(part)
        if own:
            return _around(own)
        guess = self._guesses.get(part)
        others = {other: statistics.fmean(found) for other, found in self._measured.items() if other.kind == part.kind}
        if others and guess is not None and all(self._guesses.get(other) for other in others):
            ratios = [seconds / self._guesses[other] for other, seconds in others.items()]
            return _within([guess * ratio for ratio in ratios], LIKE_OTHERS)
        if others:
            return _within(list(others.values()), UNLIKE_OTHERS)
        if guess is None:
            return None
        slowdown, factor = self._slowdowns.get(part, 1.0), TRIED if part.kind in TRIED_KINDS else GUESSED
        known = [other for other in self._measured if self._guesses.get(other)]
        if not known:  # A load of short programs slows ranks down less than one that lasts.
            expected = _within([guess * math.sqrt(slowdown)], factor)
            return replace(
                expected,
                less_load_s=expected.seconds * (1 - 1 / MACHINE),
                more_load_s=guess * slowdown * MACHINE - expected.seconds,
            )
        # Other kinds of parts show how busy the machine is; threads that wait for each other suffer more from it.
        measured_s = sum(statistics.fmean(self._measured[other]) for other in known)
        ratio = measured_s / sum(self._guesses[other] for other in known)
        least, most = sorted((ratio, slowdown))
        return replace(
            _within([guess * ratio], factor),
            less_load_s=guess * (ratio - min(least, math.sqrt(least)) / MACHINE),
            more_load_s=guess * (most * MACHINE - ratio),
        )


def _within(values: Sequence[float], factor: float) -> _PartTime:
    """Return the time of a part that is like others, up to a factor."""
    return _PartTime(statistics.fmean(values), min(values) / factor, max(values) * factor)


def _around(values: Sequence[float]) -> _PartTime:
    """Return the range of the next values, from their mean and its uncertainty."""
    mean, number = statistics.fmean(values), len(values)
    spread = statistics.stdev(values) / mean if number > 1 and mean > 0 else 0.0
    uncertainty = max(FIRST_MEASUREMENT / number, 2 * spread / math.sqrt(number), LOWEST_UNCERTAINTY)
    return _PartTime(mean, mean / (1 + uncertainty), mean * (1 + uncertainty))
