"""What torch's profiler found about some steps of a rank, summed up by operator."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import RecordError
from paceline.records.decode import WrongValue, build
from paceline.records.reader import read_json
from paceline.records.schema import profile_file
from paceline.records.value_checks import LONGEST_S
from paceline.records.writer import RunFolder, write_json

LAST_STEP = 1 << 32
"""Steps are counted in 32 bits."""


@dataclass(frozen=True)
class Operator:
    """An operator, such as aten::mm; figures are per step. Self is without what it called."""

    name: str
    calls: float
    self_cpu_s: float
    cpu_s: float | None
    """None for the sum of many: what one called may be among them too."""
    self_device_s: float
    device_s: float | None


@dataclass(frozen=True)
class Profile:
    """The steps of one rank that were profiled."""

    first_step: int
    last_step: int
    step_s: float
    """Wall time of a step under the profiler, which slows it down."""
    operators: list[Operator]
    """Those that took most time themselves, most first."""
    rest: Operator | None
    """All others together."""

    @property
    def on_device(self) -> bool:
        """Whether a GPU did the work."""
        return any(operator.self_device_s for operator in self.operators)


def write_profile(profile: Profile, folder: RunFolder, rank: int) -> None:
    """Leaves it in the record."""
    write_json(folder.path / profile_file(rank), asdict(profile))


def read_profile(file: Path) -> Profile:
    """One rank's profile."""
    try:
        found = build(Profile, read_json(file))
    except WrongValue as misfit:
        raise RecordError(f"{file} is damaged: {misfit}.") from None
    if not 0 <= found.first_step <= found.last_step < LAST_STEP or not 0 < found.step_s < LONGEST_S:
        raise RecordError(f"{file} is damaged: it is about no step, or about one that takes no time.")
    return found
