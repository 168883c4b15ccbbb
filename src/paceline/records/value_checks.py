"""Which kind of value stands under which name in a record, checked when it is read: a record may come from elsewhere.

A name that is missing is a matter for whoever needs it; what is there has to be of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecordError

LONGEST_S = 1e9
"""No time in a record is further from its beginning, which is 30 years."""


@dataclass(frozen=True)
class ValueKind:
    """A kind of value."""

    words: str
    """As in: it is not …"""
    holds: Callable[[Any], bool]

    @property
    def or_null(self) -> ValueKind:
        """The same where nothing may have been measured."""
        return ValueKind(f"{self.words} or null", lambda value: value is None or self.holds(value))

    @property
    def listed(self) -> ValueKind:
        """A list of such."""
        return ValueKind(
            f"a list, each {self.words}", lambda value: isinstance(value, list) and all(map(self.holds, value))
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
WHOLE = ValueKind("a whole number", _is_whole)
COUNT = ValueKind("a whole number, 0 or more", lambda value: _is_whole(value) and value >= 0)
SOME = ValueKind("a whole number, 1 or more", lambda value: _is_whole(value) and value >= 1)
TIME = ValueKind("a time in seconds", lambda value: _is_number(value) and abs(value) < LONGEST_S)

CONFIG = {"strategy": TEXT, "bn": TEXT, "precision": TEXT, "seed": WHOLE.or_null, "profile": TEXT.or_null}
TOPOLOGY = {
    "workload": TEXT,
    "strategy": TEXT,
    "device": TEXT,
    "lossless": FLAG,
    "exchanges": FLAG,
    "lockstep": FLAG,
    "world_size": SOME,
    "workers": SOME,
    "servers": COUNT,
    "ranks_per_host": SOME,
    "batch": SOME.or_null,
    "threads": SOME,
    "cores": POSITIVE,
    "parameters": COUNT,
    "gradient_bytes": COUNT,
    "batch_norm_layers": COUNT,
    "random_layers": COUNT,
    "classes": COUNT.or_null,
}
PROVENANCE = {"host": TEXT.or_null, "cpu": TEXT.or_null, "versions": OBJECT}
DESIGN = {
    "ranks": SOME.or_null,
    "repeats": COUNT,
    "max_repeats": COUNT,
    "looks": COUNT,
    "reference": TEXT.or_null,
    "machines": COUNT.listed,
    "bound": FLAG,
    "ranks_per_host_asked": SOME.listed,
    "machine_cores": POSITIVE.or_null,
    "host_cpus": POSITIVE.or_null,
    "emulated": TEXT.or_null,
    "gpus": COUNT,
}
LOG = {"losses": NUMBER.or_null.listed, "wall_s": TIME, "samples": NUMBER}
"""An event `log` of a run."""
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
"""A rank's entry in a summary."""
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
"""What a plan has from one rank to another, in one step."""
SOCKETS = {"steps": SOME, "links": OBJECT.listed, "interfaces": OBJECT.listed}
SOCKET_LINK = {"source": COUNT, "target": COUNT, "sent_bytes": COUNT, "received_bytes": COUNT, "resent_bytes": COUNT}
"""What the kernel counted from one rank to another, over all steps that count."""
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
    "bound": COUNT.or_null,
    "damped": COUNT,
    "dropped": COUNT,
    "counts": COUNT.listed.listed,
}
"""How old gradients were when they came to a server that does not wait; counts are pairs of an age and how many."""
CLOCK = {"at_s": TIME.or_null, "drift_s": TIME.listed}


def check_kinds(
    values: Mapping[str, Any], kinds: Mapping[str, ValueKind], what: str, file: Path, needed: Iterable[str] = ()
) -> None:
    """Refuses values of which one is not of its kind, or of which a needed one is missing."""
    missing = sorted(set(needed) - values.keys())
    if missing:
        raise RecordError(f"{file} is damaged: {what} has no {', '.join(missing)}.")
    for name, kind in kinds.items():
        if name in values and not kind.holds(values[name]):
            raise RecordError(f"{file} is damaged: {name} of {what} is not {kind.words}.")


def check_run(run: Mapping[str, Any], file: Path) -> None:
    """Refuses what was written before the first step of a run if something in it is of a wrong kind."""
    check_kinds(run["config"], CONFIG, "its config", file)
    check_kinds(run["topology"], TOPOLOGY, "its topology", file)
    check_kinds(run["provenance"], PROVENANCE, "its provenance", file)


def check_run_events(events: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Refuses events of a run if something in them is of a wrong kind."""
    for event in events:
        if event["event"] == "log":
            check_kinds(event, LOG, "an event 'log'", file)
            if event.get("losses") == []:
                raise RecordError(f"{file} is damaged: an event 'log' is about no step.")


def check_summary(summary: Mapping[str, Any], file: Path) -> None:
    """Refuses a summary if something in it is of a wrong kind."""
    check_kinds(summary, SUMMARY, "the summary", file)
    for rank in summary.get("ranks") or []:
        check_kinds(rank, RANK, "a rank", file, needed={"rank"} if "split" in rank else ())
        if "split" in rank:
            check_kinds(rank["split"], SPLIT, "a rank's split", file, needed=SPLIT.keys() - {"descheduled_s"})
    _check_bytes(summary, len(summary.get("ranks") or []) + summary.get("servers", 0), file)
    check_kinds(summary.get("test") or {}, TEST, "its test", file)
    check_kinds(summary.get("untracked") or {}, UNTRACKED, "what it says of unseen traffic", file)
    staleness = summary.get("staleness") or {}
    check_kinds(staleness, STALENESS, "its ages", file, needed=STALENESS if staleness else ())
    clock = summary.get("clock") or {}
    check_kinds(clock, CLOCK, "its clock", file)
    at_s = clock.get("at_s") or 0.0
    if at_s < 0 or any(abs(drift_s) >= at_s for drift_s in clock.get("drift_s", []) if drift_s and at_s):
        raise RecordError(f"{file} is damaged: a clock cannot drift by as much as the time that has passed.")


def _check_bytes(summary: Mapping[str, Any], ranks: int, file: Path) -> None:
    """The same of what was planned and of what was counted between ranks."""
    traffic, sockets = summary.get("traffic") or {}, summary.get("sockets") or {}
    check_kinds(traffic, TRAFFIC, "its traffic", file)
    check_kinds(sockets, SOCKETS, "its sockets", file, needed=SOCKETS if sockets else ())
    for links, kinds, what in (
        (traffic.get("links", []), PLANNED_LINK, "a link of its traffic"),
        (sockets.get("links", []), SOCKET_LINK, "a link of its sockets"),
    ):
        for link in links:
            check_kinds(link, kinds, what, file, needed=kinds)
            if max(link["source"], link["target"]) >= ranks:
                raise RecordError(f"{file} is damaged: {what} is of a rank that the run did not have.")
    for interface in sockets.get("interfaces", []):
        check_kinds(interface, INTERFACE, "an interface of its sockets", file, needed=INTERFACE)
