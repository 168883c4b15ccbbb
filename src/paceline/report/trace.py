"""One run as a trace that Perfetto and Chrome open: all ranks on one clock, a process per rank.

The format is Chrome's JSON (Trace Event Format). What lasts is a complete event ("X"), so nothing can be left open.
Operations that overlap, as DDP's buckets do, lie on lanes of their own, since slices of one thread have to nest.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.analysis.resources import cpu_shares
from paceline.analysis.steps.activity import step_activities
from paceline.errors import RecordError
from paceline.records.reader import RunRecord
from paceline.records.schema import TRACE_FILE
from paceline.records.timeline import NO_PEER, Purpose, RowKind, Timeline

VIEWER = "ui.perfetto.dev"
"""What opens a trace; it stays in the browser there."""

COMPUTE_THREAD, WIRE_THREAD, MARKS_THREAD = 1, 100, 200
PARTS_OF_MICROSECOND = 8
"""Eighths are exact in binary: Perfetto cuts nanoseconds off, and slices that touch would come to overlap by one."""
MESSAGES = (RowKind.SEND, RowKind.RECV)

NOTHING_TO_TRACE = "there are no timelines to make a trace of."

Event = dict[str, Any]
TraceTrack = tuple[int, int]
"""A rank, and which of its operations."""


def write_traces(runs: Iterable[RunRecord]) -> list[Path]:
    """Writes a trace into the folder of every run that has timelines; returns the files."""
    found = [(run, run.path / TRACE_FILE) for run in runs if run.timelines]
    if not found:
        raise RecordError(NOTHING_TO_TRACE, hint="runs keep them unless --no-events is given")
    for run, path in found:
        write_trace(run, path)
    return [path for _, path in found]


def where_traces_are(paths: Sequence[Path]) -> str:
    """A sentence that says where traces are, and what opens them."""
    if len(paths) == 1:
        return f"trace: {paths[0]}, which {VIEWER} opens"
    common = os.path.commonpath(paths)
    return f"traces: {len(paths)} files {TRACE_FILE} in the runs' folders under {common}, which {VIEWER} opens"


def write_trace(run: RunRecord, path: Path) -> None:
    """Writes the trace of a run; it is there in full or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit":"ms","otherData":{_json(_about(run))},"traceEvents":[')
            file.writelines(_lines(trace_events(run)))
            file.write("\n]}\n")
        temporary.replace(path)
    except OSError as error:
        hint = f"the record is there: mend that, then `paceline report {run.path} --trace`"
        raise RecordError(f"cannot write {path}: {error.strerror}.", hint=hint) from None
    finally:
        temporary.unlink(missing_ok=True)


def trace_events(run: RunRecord) -> Iterator[Event]:
    """Every event of the trace, rank by rank."""
    links = _links(run.timelines)
    for rank, timeline in run.timelines.items():
        yield _name("process_name", rank, 0, _process(rank, run))
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        yield _name("thread_name", rank, COMPUTE_THREAD, "compute")
        yield from _computing(rank, timeline)
        yield from _wire(rank, timeline, links)
        yield from _marks(rank, run)
        yield from _used(rank, run)


def _process(rank: int, run: RunRecord) -> str:
    """A rank's name, with its host where there are several."""
    per_host, world = run.topology.get("ranks_per_host"), run.topology.get("world_size")
    several = isinstance(per_host, int) and isinstance(world, int) and 0 < per_host < world
    return f"rank {rank}, host {rank // per_host}" if several and per_host else f"rank {rank}"


def _about(run: RunRecord) -> Event:
    names = {"workload": run.topology.get("workload"), "strategy": run.config.get("strategy")}
    return {"clock": "seconds since the run began, on rank 0's clock", **{k: v for k, v in names.items() if v}}


def _lines(events: Iterable[Event]) -> Iterator[str]:
    for number, event in enumerate(events):
        yield f"{',' if number else ''}\n{_json(event)}"


def _json(content: Event) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _name(what: str, rank: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _slice(rank: int, thread: int, name: str, start_s: float, end_s: float) -> Event:
    start, end = _microseconds(start_s), _microseconds(end_s)
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": start, "dur": max(0, end - start)}


def _microseconds(seconds: float) -> float:
    parts = round(seconds * 1e6 * PARTS_OF_MICROSECOND)
    return parts // PARTS_OF_MICROSECOND if parts % PARTS_OF_MICROSECOND == 0 else parts / PARTS_OF_MICROSECOND


def _computing(rank: int, timeline: Timeline) -> Iterator[Event]:
    """The steps, and in each of them what the computing thread did."""
    for step in step_activities(timeline):
        yield _slice(rank, COMPUTE_THREAD, f"step {step.step}", step.start_s, step.end_s)
        for what, start_s, end_s in step.activities:
            yield _slice(rank, COMPUTE_THREAD, what, start_s, end_s)


class _Lanes:
    """Threads of one rank that slices are put on, each on the first that is free."""

    def __init__(self, rank: int, first: int, name: str) -> None:
        self._rank, self._first, self._name = rank, first, name
        self._free_from_s: list[float] = []

    def put(self, name: str, start_s: float, end_s: float, more: Event) -> Iterator[Event]:
        """The slice, after the name of its thread where that is a new one."""
        free = (lane for lane, free_s in enumerate(self._free_from_s) if free_s <= start_s)
        lane = next(free, len(self._free_from_s))
        if lane == len(self._free_from_s):
            self._free_from_s.append(end_s)
            number = f" {lane + 1}" if lane else ""
            yield _name("thread_name", self._rank, self._first + lane, self._name + number)
        self._free_from_s[lane] = end_s
        yield _slice(self._rank, self._first + lane, name, start_s, end_s) | more


def _wire(rank: int, timeline: Timeline, links: Mapping[TraceTrack, Event]) -> Iterator[Event]:
    """The operations."""
    lanes = _Lanes(rank, WIRE_THREAD, "wire")
    for place, row in enumerate(timeline.operations):
        kind = RowKind(int(row["kind"]))
        more = links.get((rank, place), {}) | {"args": _operation(kind, row)}
        yield from lanes.put(kind.title, float(row["start_s"]), float(row["end_s"]), more)


def _operation(kind: RowKind, row: Any) -> Event:
    peer = int(row["peer"])
    role = {RowKind.SEND: "to", RowKind.RECV: "from"}.get(kind, "root")
    about = {"step": int(row["step"]), "bytes": int(row["bytes"]), "carries": Purpose(int(row["purpose"])).title}
    return about if peer == NO_PEER else about | {role: peer}


def _marks(rank: int, run: RunRecord) -> Iterator[Event]:
    """What happened beside the steps; what has no length is a moment."""
    lanes = _Lanes(rank, MARKS_THREAD, "beside the steps")
    for mark in sorted(run.marks.get(rank, []), key=lambda mark: mark.start_s):
        args = {"args": {"what": mark.detail}} if mark.detail else {}
        if mark.end_s > mark.start_s:
            yield from lanes.put(mark.kind, mark.start_s, mark.end_s, args)
        else:
            at = {"pid": rank, "tid": COMPUTE_THREAD, "ts": _microseconds(mark.start_s)}
            yield {"ph": "i", "s": "t", "name": mark.kind, **at, **args}


def _used(rank: int, run: RunRecord) -> Iterator[Event]:
    """CPU and memory of the process, as counters."""
    samples = run.resources.get(rank)
    if samples is None:
        return
    for time_s, share in zip(*cpu_shares(samples), strict=True):
        yield _counter(rank, "CPU, %", float(time_s), round(100 * float(share), 1))
    for time_s, size in zip(samples["time_s"], samples["resident_bytes"], strict=True):
        yield _counter(rank, "memory, MB", float(time_s), round(float(size) / 1e6, 1))


def _counter(rank: int, name: str, time_s: float, value: float) -> Event:
    return {"ph": "C", "pid": rank, "name": name, "ts": _microseconds(time_s), "args": {"": value}}


def _links(timelines: Mapping[int, Timeline]) -> dict[TraceTrack, Event]:
    """What ties the slices of one operation on several ranks together, as arrows from the first that came to it."""
    groups: dict[tuple[Any, ...], list[tuple[float, TraceTrack]]] = defaultdict(list)
    for rank, timeline in timelines.items():
        seen: dict[tuple[Any, ...], int] = defaultdict(int)
        for place, row in enumerate(timeline.operations):
            key = _what_it_is(rank, row)
            groups[*key, seen[key]].append((float(row["start_s"]), (rank, place)))
            seen[key] += 1
    links: dict[TraceTrack, Event] = {}
    numbers = itertools.count(1)
    for key, members in groups.items():
        if len(members) != (2 if key[1] == "message" else len(timelines)) or len(members) < 2:
            continue
        number = next(numbers)
        for order, (_, member) in enumerate(sorted(members)):
            links[member] = {"bind_id": number, "flow_in" if order else "flow_out": True}
    return links


def _what_it_is(rank: int, row: Any) -> tuple[Any, ...]:
    """What the parts of one operation have in common on all ranks; the n-th such of a step is the same one."""
    kind, step, peer, size = RowKind(int(row["kind"])), int(row["step"]), int(row["peer"]), int(row["bytes"])
    if kind is RowKind.SEND:
        return step, "message", rank, peer, size
    if kind is RowKind.RECV:
        return step, "message", peer, rank, size
    return step, kind, peer, size
