"""Results of torch's profiler for some steps of a rank, summed by operator."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import RecordError
from paceline.records.decode import DecodeError, build
from paceline.records.reader import read_json
from paceline.records.schema import profile_file
from paceline.records.value_checks import MAX_TIME_S
from paceline.records.writer import RunFolder, write_json

LAST_STEP = 1 << 32
"""Upper limit of step numbers, which timelines store in 32 bits."""


@dataclass(frozen=True)
class Operator:
    """An operator, such as `aten::mm`. Values are per step; `self_` values exclude the operators that it called."""

    name: str
    calls: float
    self_cpu_s: float
    cpu_s: float | None
    """None for a sum of several operators, since one may have called another."""
    self_device_s: float
    device_s: float | None


@dataclass(frozen=True)
class Profile:
    """Profile of some steps on one rank."""

    first_step: int
    last_step: int
    step_s: float
    """Wall time of a step under the profiler, which slows it down."""
    operators: list[Operator]
    """Operators with the most self time, largest first."""
    rest: Operator | None
    """Sum of all other operators."""

    @property
    def on_device(self) -> bool:
        """Whether a GPU executed any of the operators."""
        return any(operator.self_device_s for operator in self.operators)


def write_profile(profile: Profile, folder: RunFolder, rank: int) -> None:
    """Write the profile to the record."""
    write_json(folder.path / profile_file(rank), asdict(profile))


def read_profile(file: Path) -> Profile:
    """Read one rank's profile."""
    try:
        found = build(Profile, read_json(file))
    except DecodeError as error:
        raise RecordError(f"{file} is damaged: {error}.") from None
    if not 0 <= found.first_step <= found.last_step < LAST_STEP or not 0 < found.step_s < MAX_TIME_S:
        raise RecordError(f"{file} is damaged: its range of steps is empty, or its step time is not above 0.")
    return found
