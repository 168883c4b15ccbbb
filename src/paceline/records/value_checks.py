"""Types of the values in a record, checked when the record is read: a record may come from an untrusted source.

Values that are present must have the right type. Missing values are checked by the code that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecordError

MAX_TIME_S = 1e9
"""Upper limit of times in a record, in seconds since its start: 30 years."""


@dataclass(frozen=True)
class ValueKind:
    """A type of value, with the test that checks it."""

    description: str
    """Completes the sentence "it is not …"."""
    accepts: Callable[[Any], bool]

    @property
    def or_null(self) -> ValueKind:
        """The same type, or null if nothing was measured."""
        return ValueKind(f"{self.description} or null", lambda value: value is None or self.accepts(value))

    @property
    def listed(self) -> ValueKind:
        """A list of values of this type."""
        return ValueKind(
            f"a list, each {self.description}", lambda value: isinstance(value, list) and all(map(self.accepts, value))
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return type(value) is int


TEXT = ValueKind("text", lambda value: isinstance(value, str))
FLAG = ValueKind("true or false", lambda value: isinstance(value, bool))
OBJECT = ValueKind("a JSON object", lambda value: isinstance(value, dict))
NUMBER = ValueKind("a number", _is_number)
POSITIVE = ValueKind("a number above 0", lambda value: _is_number(value) and value > 0)
INTEGER = ValueKind("a whole number", _is_whole)
COUNT = ValueKind("a whole number, 0 or more", lambda value: _is_whole(value) and value >= 0)
POSITIVE_COUNT = ValueKind("a whole number, 1 or more", lambda value: _is_whole(value) and value >= 1)
TIME = ValueKind("a time in seconds", lambda value: _is_number(value) and abs(value) < MAX_TIME_S)

CONFIG = {"strategy": TEXT, "bn": TEXT, "precision": TEXT, "seed": INTEGER.or_null, "profile": TEXT.or_null}
TOPOLOGY = {
    "workload": TEXT,
    "strategy": TEXT,
    "device": TEXT,
    "lossless": FLAG,
    "exchanges": FLAG,
    "lockstep": FLAG,
    "world_size": POSITIVE_COUNT,
    "workers": POSITIVE_COUNT,
    "servers": COUNT,
    "ranks_per_host": POSITIVE_COUNT,
    "batch": POSITIVE_COUNT.or_null,
    "threads": POSITIVE_COUNT,
    "cores": POSITIVE,
    "parameters": COUNT,
    "gradient_bytes": COUNT,
    "batch_norm_layers": COUNT,
    "random_layers": COUNT,
    "classes": COUNT.or_null,
}
PROVENANCE = {"host": TEXT.or_null, "cpu": TEXT.or_null, "versions": OBJECT}
DESIGN = {
    "ranks": POSITIVE_COUNT.or_null,
    "repeats": COUNT,
    "max_repeats": COUNT,
    "interim_analyses": COUNT,
    "reference": TEXT.or_null,
    "machines": COUNT.listed,
    "ranks_pinned": FLAG,
    "requested_ranks_per_host": POSITIVE_COUNT.listed,
    "machine_cores": POSITIVE.or_null,
    "host_cpus": POSITIVE.or_null,
    "emulated": TEXT.or_null,
    "gpus": COUNT,
}
LOG = {"losses": NUMBER.or_null.listed, "wall_s": TIME, "samples": NUMBER}
"""Values of an event `log` of a run."""
SUMMARY = {
    "steps": COUNT.or_null,
    "train_s": TIME.or_null,
    "step_s": TIME.or_null,
    "samples_per_s": NUMBER.or_null,
    "average_loss": NUMBER.or_null,
    "weight_divergence": NUMBER.or_null,
    "ranks": OBJECT.listed.or_null,
    "servers": COUNT,
    "traffic": OBJECT.or_null,
    "sockets": OBJECT.or_null,
    "clock": OBJECT.or_null,
    "untracked": OBJECT.or_null,
    "test": OBJECT.or_null,
    "staleness": OBJECT.or_null,
}
RANK = {
    "rank": COUNT,
    "peak_bytes": NUMBER.or_null,
    "cpu_share": NUMBER.or_null,
    "resident_bytes": NUMBER.or_null,
    "split": OBJECT,
}
"""Values of a rank in a summary."""
SPLIT = {
    "step_s": POSITIVE,
    "compute_s": NUMBER,
    "overlapped_s": NUMBER,
    "exposed_s": NUMBER,
    "other_s": NUMBER,
    "data_s": NUMBER,
    "descheduled_s": NUMBER.or_null,
}
TRAFFIC = {"sent_bytes": NUMBER.listed, "received_bytes": NUMBER.listed, "links": OBJECT.listed}
PLANNED_LINK = {"source": COUNT, "target": COUNT, "payload_bytes": COUNT, "framing_bytes": COUNT}
"""Planned bytes from one rank to another in one step."""
SOCKETS = {"steps": POSITIVE_COUNT, "links": OBJECT.listed, "interfaces": OBJECT.listed}
SOCKET_LINK = {
    "source": COUNT,
    "target": COUNT,
    "sent_bytes": COUNT,
    "received_bytes": COUNT,
    "retransmitted_bytes": COUNT,
}
"""Bytes that the kernel counted from one rank to another, over all counted steps."""
INTERFACE = {"name": TEXT, "ranks": COUNT.listed, "sent_bytes": COUNT, "received_bytes": COUNT}
TEST = {
    "loss": NUMBER.or_null,
    "accuracy": NUMBER.or_null,
    "samples": NUMBER.or_null,
    "available": NUMBER.or_null,
}
UNTRACKED = {"groups": NUMBER.or_null, "operations": NUMBER.or_null}
STALENESS = {
    "gradients": COUNT,
    "mean": NUMBER.or_null,
    "median": COUNT.or_null,
    "max": COUNT.or_null,
    "max_allowed": COUNT.or_null,
    "damped": COUNT,
    "dropped": COUNT,
    "counts": COUNT.listed.listed,
}
"""Staleness of gradients when an asynchronous server applied them; `counts` has pairs (staleness, gradients)."""
CLOCK = {"measured_at_s": TIME.or_null, "drift_s": TIME.listed}


def check_kinds(
    values: Mapping[str, Any], kinds: Mapping[str, ValueKind], section: str, file: Path, needed: Iterable[str] = ()
) -> None:
    """Raise `RecordError` if a value has the wrong type or a needed value is missing."""
    missing = sorted(set(needed) - values.keys())
    if missing:
        raise RecordError(f"{file} is damaged: {section} has no {', '.join(missing)}.")
    for name, kind in kinds.items():
        if name in values and not kind.accepts(values[name]):
            raise RecordError(f"{file} is damaged: {name} of {section} is not {kind.description}.")


def check_run(run: Mapping[str, Any], file: Path) -> None:
    """Raise `RecordError` if a value of `run.json` has the wrong type."""
    check_kinds(run["config"], CONFIG, "its config", file)
    check_kinds(run["topology"], TOPOLOGY, "its topology", file)
    check_kinds(run["provenance"], PROVENANCE, "its provenance", file)


def check_run_events(events: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Raise `RecordError` if a value of a run's events has the wrong type."""
    for event in events:
        if event["event"] == "log":
            check_kinds(event, LOG, "an event 'log'", file)
            if event.get("losses") == []:
                raise RecordError(f"{file} is damaged: an event 'log' has no losses.")


def check_summary(summary: Mapping[str, Any], file: Path) -> None:
    """Raise `RecordError` if a value of a summary has the wrong type."""
    check_kinds(summary, SUMMARY, "the summary", file)
    for rank in summary.get("ranks") or []:
        check_kinds(rank, RANK, "a rank", file, needed={"rank"} if "split" in rank else ())
        if "split" in rank:
            check_kinds(rank["split"], SPLIT, "a rank's split", file, needed=SPLIT.keys() - {"descheduled_s"})
    _check_bytes(summary, len(summary.get("ranks") or []) + summary.get("servers", 0), file)
    check_kinds(summary.get("test") or {}, TEST, "its test", file)
    check_kinds(summary.get("untracked") or {}, UNTRACKED, "its untracked traffic", file)
    staleness = summary.get("staleness") or {}
    check_kinds(staleness, STALENESS, "its staleness", file, needed=STALENESS if staleness else ())
    clock = summary.get("clock") or {}
    check_kinds(clock, CLOCK, "its clock", file)
    measured_at_s = clock.get("measured_at_s") or 0.0
    if measured_at_s < 0 or any(
        abs(drift_s) >= measured_at_s for drift_s in clock.get("drift_s", []) if drift_s and measured_at_s
    ):
        raise RecordError(f"{file} is damaged: the drift of a clock is not below the elapsed time.")


def _check_bytes(summary: Mapping[str, Any], ranks: int, file: Path) -> None:
    """Raise `RecordError` if planned or counted bytes between ranks have a wrong type or an unknown rank."""
    traffic, sockets = summary.get("traffic") or {}, summary.get("sockets") or {}
    check_kinds(traffic, TRAFFIC, "its traffic", file)
    check_kinds(sockets, SOCKETS, "its sockets", file, needed=SOCKETS if sockets else ())
    for links, kinds, section in (
        (traffic.get("links", []), PLANNED_LINK, "a link of its traffic"),
        (sockets.get("links", []), SOCKET_LINK, "a link of its sockets"),
    ):
        for link in links:
            check_kinds(link, kinds, section, file, needed=kinds)
            if max(link["source"], link["target"]) >= ranks:
                raise RecordError(f"{file} is damaged: {section} names a rank that the run did not have.")
    for interface in sockets.get("interfaces", []):
        check_kinds(interface, INTERFACE, "an interface of its sockets", file, needed=INTERFACE)
