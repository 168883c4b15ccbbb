"""Continue an experiment in its folder: compare its description with the one that a new command makes.

An experiment goes on only as it began: same candidates, settings, machine and software. Otherwise its figures would mix
measurements that cannot be compared.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from paceline.config import (
    BatchConfig,
    CompareConfig,
    LargeBatchConfig,
    LaunchConfig,
    RaceConfig,
    RunConfig,
    ScaleConfig,
)
from paceline.config.fields import owners
from paceline.config.recipe import is_recipe_file
from paceline.config.setting import option_name, select
from paceline.config.specs import Spec
from paceline.errors import RecordError
from paceline.formatting import join_names, plural
from paceline.records.events import (
    ContinuedEvent,
    EndEvent,
    ExperimentEvent,
    FailureEvent,
    InterruptedEvent,
    ParityEvent,
    events_of,
)
from paceline.records.provenance import Provenance, with_out
from paceline.records.settings import Settings
from paceline.user_code import file_digest, source_digest

if TYPE_CHECKING:
    from paceline.records.experiment.design import Candidate, Design, ExperimentDescription

MAY_CHANGE = frozenset(select(RunConfig, lambda metadata: metadata.may_change))
"""Settings of runs that may have another value when an experiment goes on."""
_OWNERS = owners(RunConfig, LaunchConfig, CompareConfig, ScaleConfig, BatchConfig, LargeBatchConfig, RaceConfig)
_NEW_FOLDER = "name another folder with --out"


def standing_events(events: Sequence[ExperimentEvent]) -> list[ExperimentEvent]:
    """Return the events without those that a continuation made obsolete.

    After a continuation, an experiment is no longer interrupted or ended, and candidates that are tried again have not
    failed.
    """
    standing: list[ExperimentEvent] = []
    for event in events:
        if isinstance(event, ContinuedEvent):
            standing = [one for one in standing if not _is_obsolete(one, event)]
        if isinstance(event, ParityEvent):  # A candidate whose code has changed is proven again.
            proven = event.candidate
            standing = [one for one in standing if not (isinstance(one, ParityEvent) and one.candidate == proven)]
        standing.append(event)
    return standing


def _is_obsolete(event: ExperimentEvent, continued: ContinuedEvent) -> bool:
    if isinstance(event, FailureEvent):
        return event.candidate in continued.retried
    return isinstance(event, InterruptedEvent | EndEvent)


def part_of(folder: str, events: Iterable[ExperimentEvent]) -> int:
    """Return the number of the continuation in which a run was measured; 0 if it was before the first one."""
    continued = events_of(events, ContinuedEvent)
    return max((number for number, event in enumerate(continued, start=1) if folder not in event.kept), default=0)


def user_code_of(candidates: Sequence[Candidate], config: Settings) -> dict[str, str | None]:
    """Return a digest of each of the user's files that an experiment names: modules, script and recipe."""
    return {name: _digest(name) for candidate in candidates for name in _code_of(candidate, config)}


def _code_of(candidate: Candidate, config: Settings) -> Iterator[str]:
    """Yield the user's modules, and the paths of the script and of the recipe, that a candidate's runs use."""
    settings = config | candidate.settings
    if settings.get("script"):
        yield str(settings["script"])
    elif ":" in str(settings.get("workload", "")):
        yield str(settings["workload"]).partition(":")[0]
    if is_recipe_file(str(settings.get("recipe") or "")):
        yield str(settings["recipe"])
    strategy = Spec.parse(candidate.strategy).name
    if ":" in strategy:
        yield strategy.partition(":")[0]


def _digest(name: str) -> str | None:
    if Path(name).is_file():
        return file_digest(Path(name))
    try:
        return source_digest(name)
    except (ImportError, ValueError):
        return None


def changed_code(old: ExperimentDescription, new: ExperimentDescription, kept: Collection[str]) -> set[str]:
    """Return the candidates whose code has changed since their proof; raise if some have runs that are `kept`."""
    changed = {name for name, digest in old.user_code.items() if new.user_code.get(name, digest) != digest}
    affected = {one.name: sorted(changed & set(_code_of(one, new.config))) for one in new.candidates}
    for name in kept:
        if affected[name]:
            raise RecordError(
                f"{join_names(affected[name])} has changed since {name} was measured.",
                hint=f"times of two versions cannot be compared: {_NEW_FOLDER}, or restore the earlier version",
            )
    return {name for name, modules in affected.items() if modules}


def check_same(path: Path, old: ExperimentDescription, new: ExperimentDescription) -> None:
    """Raise `RecordError` unless a command may continue the experiment in a folder."""
    command = with_out(old.provenance.command, path)
    if new.kind != old.kind:
        raise RecordError(
            f"{path} already contains a record: an experiment of `paceline {old.kind}`.", hint=_NEW_FOLDER
        )
    origin = list(_other_origin(old.provenance, new.provenance))
    if origin:
        raise RecordError(
            f"{path} already contains a record, measured with {join_names(origin)}.",
            hint=f"times of both cannot be compared: {_NEW_FOLDER}, or go on with the same machine and versions",
        )
    settings = list(dict.fromkeys(_other_settings(old, new)))
    if settings:
        raise RecordError(
            f"{path} already contains a record with other settings: {'; '.join(settings)}.",
            hint=f"{_NEW_FOLDER}, or go on with the original command: `{command}`",
        )


def _other_origin(old: Provenance, new: Provenance) -> Iterator[str]:
    """Yield the facts about machine and software that differ, as in `torch 2.12.0 (now 2.13.0)`.

    The name of the host may differ: a container has another one each time. The report warns of it.
    """
    before, now = _origin(old), _origin(new)
    for name, value in before.items():
        if value is not None and now.get(name) is not None and now[name] != value:
            yield f"{name} {value} (now {now[name]})"


def _origin(provenance: Provenance) -> dict[str, Any]:
    versions = {name: provenance.versions.get(name) for name in ("paceline", "torch", "numpy")}
    own = {"Paceline's sources": provenance.sources, "Python": provenance.python}
    return {"the processor": provenance.cpu, "cores": provenance.cpu_count} | own | versions


def _other_settings(old: ExperimentDescription, new: ExperimentDescription) -> Iterator[str]:
    """Yield the settings that differ, as in `--batch 256 (now 128)`."""
    before, now = _settings(old), _settings(new)
    for name in [*before, *(name for name in now if name not in before)]:
        if before.get(name) != now.get(name):
            yield _format_difference(_format_name(name, old.design), before.get(name), now.get(name))
    for name, least in {"repeats": old.design.repeats, "max_repeats": most_repeats(old.design)}.items():
        value = new.design.repeats if name == "repeats" else most_repeats(new.design)
        if value < least:
            yield f"{_format_name(name, old.design)} {least} (now {value}; it can only be raised)"
    names = [{one.name for one in found.candidates} for found in (old, new)]
    for names_only, word in ((names[0] - names[1], "without"), (names[1] - names[0], "with")):
        if names_only:
            yield f"now {word} {join_names(sorted(names_only))}"
    if names[0] == names[1] and old.candidates != new.candidates:
        yield "other candidates of the same names, or in another order"


def _settings(description: ExperimentDescription) -> dict[str, Any]:
    """Return the settings that define an experiment, as JSON values."""
    design = msgspec.to_builtins(description.design)
    fixed = {name: value for name, value in design.items() if name not in description.design.may_change}
    config = {name: value for name, value in description.config.items() if name not in MAY_CHANGE}
    settings: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(fixed | config))
    return settings


def _format_difference(name: str, before: Any, now: Any) -> str:
    if isinstance(before, dict | list) or isinstance(now, dict | list):
        nested = any(isinstance(item, dict) for value in (before, now) for item in value or ())
        if nested:
            return name
        before, now = (" ".join(map(str, value or ())) or None for value in (before, now))
    return f"{name} {_format_value(before)} (now {_format_value(now)})"


def _format_name(name: str, design: Design) -> str:
    option = option_name(_OWNERS[name], name) if name in _OWNERS else name.replace("_", " ")
    return design.option_names.get(name, option)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value in (None, "") else str(value)


def most_repeats(design: Design) -> int:
    """Return the largest number of repeats of an experiment."""
    return max(design.repeats, design.max_repeats)


def continued_design(old: Design, new: Design) -> Design:
    """Return the design of an experiment that goes on, perhaps with more repeats.

    A winner was looked for after the repeats of the old design; the looks of both share the total error rate.
    """
    if (new.repeats, most_repeats(new)) == (old.repeats, most_repeats(old)):
        return old
    own_looks = max(1, most_repeats(old) - old.repeats + 1)
    earlier_looks = old.interim_analyses - (own_looks if new.repeats <= old.repeats else 0)
    looks = new.interim_analyses + max(0, earlier_looks)
    return replace(old, repeats=new.repeats, max_repeats=new.max_repeats, interim_analyses=looks)


def already_finished(path: Path, runs: int, failed: Sequence[str], design: Design) -> RecordError:
    """Return the error for a command whose experiment is complete."""
    more = list(dict.fromkeys(_format_name(name, design) for name in ("repeats", "max_repeats")))
    verb = "measure" if len(more) > 1 else "measures"
    again = f", and try {join_names(list(failed))} again" if failed else ""
    report = f"paceline report {shlex.quote(str(path))}"
    return RecordError(
        f"{path} contains this experiment already; it is finished, with {plural(runs, 'run')}.",
        hint=f"`{report}` shows it; larger {join_names(more)} {verb} more{again}; or {_NEW_FOLDER}",
    )


def failures_of(events: Sequence[ExperimentEvent]) -> dict[str, FailureEvent]:
    """Return the failure of each candidate that has failed, without those that were tried again since."""
    found = {event.candidate: event for event in reversed(events_of(standing_events(events), FailureEvent))}
    return dict(reversed(found.items()))


def is_finished(events: Sequence[ExperimentEvent]) -> bool:
    """Return whether an experiment has ended by itself."""
    return bool(events_of(standing_events(events), EndEvent))
