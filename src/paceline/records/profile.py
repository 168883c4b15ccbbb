"""What torch's profiler found about some steps of a rank, summed up by operator."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paceline.errors import RecordError
from paceline.records.reader import read_json
from paceline.records.schema import profile_file
from paceline.records.writer import RunFolder, write_json


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
    content = read_json(file)
    try:
        operators = [_operator(entry) for entry in content["operators"]]
        rest = None if content["rest"] is None else _operator(content["rest"])
        first, last, step_s = int(content["first_step"]), int(content["last_step"]), float(content["step_s"])
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{file} is damaged: it is not a profile ({error}).") from None
    return Profile(first, last, step_s, operators, rest)


def _operator(entry: dict[str, Any]) -> Operator:
    values = {field.name: entry[field.name] for field in fields(Operator) if field.name != "name"}
    missing_totals = {"cpu_s", "device_s"}
    numbers = {
        name: None if value is None and name in missing_totals else float(value) for name, value in values.items()
    }
    return Operator(name=str(entry["name"]), **numbers)  # type: ignore[arg-type]
