"""Time per operator, measured by torch's profiler: rows of the table, and sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config import step_range
from paceline.errors import UsageError
from paceline.formatting import plural, seconds
from paceline.records import RunRecord
from paceline.records.profile import Operator, Profile


@dataclass(frozen=True)
class ProfileRow:
    """Operator on one rank; figures are per step."""

    name: str
    calls: float
    self_cpu_s: float
    cpu_s: float | None
    self_device_s: float | None
    """None where no GPU did any work, like `device_s`."""
    device_s: float | None
    share: float
    """Share of the own time of all operators: GPU time where a GPU did the work, else CPU time."""

    @property
    def self_s(self) -> float:
        """Own time, on the GPU where it did the work."""
        return self.self_device_s or self.self_cpu_s


def profile_rows(run: RunRecord, rank: int | None = None) -> list[ProfileRow]:
    """Return the operators of a rank (None: the lowest profiled one), longest first; empty without a profile."""
    profile = _profile_of(run, rank)
    if profile is None:
        return []
    operators = [*profile.operators, *([] if profile.rest is None else [profile.rest])]
    whole = sum(_self_s(operator, profile) for operator in operators)
    return [_row(operator, profile, whole) for operator in operators]


def profile_sentences(run: RunRecord) -> Iterator[str]:
    """Yield which steps were profiled, and which requested ones were not."""
    requested = _requested_steps(run)
    profile = _profile_of(run, None)
    if profile is not None:
        rank = min(run.profiles)
        traces = f"{plural(len(run.profiles), 'trace')} for Perfetto in the record's folder"
        yield (
            f"{_format_steps(range(profile.first_step, profile.last_step + 1))} of rank {rank} ran under torch's "
            f"profiler, {seconds(profile.step_s)} each, which no other figure counts; {traces}"
        )
    done = range(0) if profile is None else range(profile.first_step, profile.last_step + 1)
    if len(done) < len(requested):
        missing = requested[len(done) :]
        yield f"{_format_steps(missing)} could not be profiled: the run ended before that"


def _requested_steps(run: RunRecord) -> range:
    text = run.config.get("profile")
    try:
        return step_range(str(text), "profile") if text else range(0)
    except UsageError:  # Another version wrote the record in another format.
        return range(0)


def _format_steps(steps: range) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def _profile_of(run: RunRecord, rank: int | None) -> Profile | None:
    if not run.profiles:
        return None
    return run.profiles.get(min(run.profiles) if rank is None else rank)


def _self_s(operator: Operator, profile: Profile) -> float:
    return operator.self_device_s if profile.on_device else operator.self_cpu_s


def _row(operator: Operator, profile: Profile, whole: float) -> ProfileRow:
    return ProfileRow(
        name=operator.name,
        calls=operator.calls,
        self_cpu_s=operator.self_cpu_s,
        cpu_s=operator.cpu_s,
        self_device_s=operator.self_device_s if profile.on_device else None,
        device_s=operator.device_s if profile.on_device else None,
        share=_self_s(operator, profile) / whole if whole else 0.0,
    )
