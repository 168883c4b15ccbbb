"""Results of torch's profiler for some steps of a rank, summed by operator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from paceline.errors import RecordError
from paceline.records.decoder import read_model
from paceline.records.schema import profile_file
from paceline.records.value_types import PositiveSeconds
from paceline.records.writer import RunFolder, write_json

LAST_STEP = 1 << 32
"""Upper limit of step numbers, which timelines store in 32 bits."""
StepNumber = Annotated[int, Meta(ge=0, lt=LAST_STEP)]


class Operator(Struct, frozen=True):
    """An operator, such as `aten::mm`. Values are per step; `self_` values exclude the operators that it called."""

    name: str
    calls: float
    self_cpu_s: float
    cpu_s: float | None
    """None for a sum of several operators, since one may have called another."""
    self_device_s: float
    device_s: float | None


class Profile(Struct, frozen=True):
    """Profile of some steps on one rank."""

    first_step: StepNumber
    last_step: StepNumber
    step_s: PositiveSeconds
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
    write_json(folder.path / profile_file(rank), profile)


def read_profile(file: Path) -> Profile:
    """Read one rank's profile."""
    found = read_model(file, Profile, "profile")
    if found.last_step < found.first_step:
        raise RecordError(f"{file} is damaged: profile.last_step is before profile.first_step.")
    return found
