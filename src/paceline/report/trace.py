"""Trace of a run for Perfetto and Chrome: all ranks on one clock, one process per rank.

The format is Chrome's JSON (Trace TraceEvent Format). Slices are complete events ("X"), so none can be left open.
Operations that overlap, such as DDP's buckets, are put on separate lanes, since slices of one thread must nest.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.analysis.resources import cpu_shares
from paceline.analysis.steps.activity import step_activities
from paceline.errors import RecordError
from paceline.records.atomic_file import atomic_file
from paceline.records.reader import RunRecord
from paceline.records.schema import TRACE_FILE
from paceline.records.timeline import NO_PEER, Purpose, RowKind, Timeline

VIEWER = "ui.perfetto.dev"
"""Viewer for traces; the file does not leave the browser."""

COMPUTE_THREAD, COMMUNICATION_THREAD, MARKS_THREAD = 1, 100, 200
PARTS_OF_MICROSECOND = 8
"""Resolution of times. Eighths are exact in binary: Perfetto truncates to nanoseconds, so adjacent slices with inexact
times would overlap by one nanosecond."""

NOTHING_TO_TRACE = "the records contain no timelines to make a trace of."

TraceEvent = dict[str, Any]
OperationId = tuple[int, int]
"""Rank, and index of one of its operations."""


def write_traces(runs: Iterable[RunRecord]) -> list[Path]:
    """Write a trace into the folder of every run with timelines; return the files. Raise RecordError for none."""
    found = [(run, run.path / TRACE_FILE) for run in runs if run.timelines]
    if not found:
        raise RecordError(NOTHING_TO_TRACE, hint="run without --no-events to record timelines")
    for run, path in found:
        write_trace(run, path)
    return [path for _, path in found]


def format_trace_paths(paths: Sequence[Path]) -> str:
    """Return a line that says where the traces are and how to open them."""
    if len(paths) == 1:
        return f"trace: {paths[0]} (open it in {VIEWER})"
    common = os.path.commonpath(paths)
    return f"traces: {len(paths)} files {TRACE_FILE} in the runs' folders under {common} (open them in {VIEWER})"


def write_trace(run: RunRecord, path: Path) -> None:
    """Write the trace of a run atomically; raise RecordError if the file cannot be written."""
    try:
        with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit":"ms","otherData":{_json(_about(run))},"traceEvents":[')
            file.writelines(_lines(trace_events(run)))
            file.write("\n]}\n")
    except OSError as error:
        hint = f"the record is complete: fix that, then run `paceline report {run.path} --trace`"
        raise RecordError(f"cannot write {path}: {error.strerror}.", hint=hint) from None


def trace_events(run: RunRecord) -> Iterator[TraceEvent]:
    """Yield every event of the trace, rank by rank."""
    flows = _flows(run.timelines)
    for rank, timeline in run.timelines.items():
        yield _name("process_name", rank, 0, _process_name(rank, run))
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        yield _name("thread_name", rank, COMPUTE_THREAD, "compute")
        yield from _compute_slices(rank, timeline)
        yield from _operation_slices(rank, timeline, flows)
        yield from _marks(rank, run)
        yield from _resource_counters(rank, run)


def _process_name(rank: int, run: RunRecord) -> str:
    """Return a rank's name, with its host where there are several."""
    per_host, world = run.topology.ranks_per_host, run.topology.world_size
    return f"rank {rank}, host {rank // per_host}" if per_host < world else f"rank {rank}"


def _about(run: RunRecord) -> TraceEvent:
    names = {"workload": run.topology.workload, "strategy": run.config["strategy"]}
    return {"clock": "seconds since the run began, on rank 0's clock", **{k: v for k, v in names.items() if v}}


def _lines(events: Iterable[TraceEvent]) -> Iterator[str]:
    for number, event in enumerate(events):
        yield f"{',' if number else ''}\n{_json(event)}"


def _json(content: TraceEvent) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _name(what: str, rank: int, thread: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _slice(rank: int, thread: int, name: str, start_s: float, end_s: float) -> TraceEvent:
    start, end = _microseconds(start_s), _microseconds(end_s)
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": start, "dur": max(0, end - start)}


def _microseconds(seconds: float) -> float:
    parts = round(seconds * 1e6 * PARTS_OF_MICROSECOND)
    return parts // PARTS_OF_MICROSECOND if parts % PARTS_OF_MICROSECOND == 0 else parts / PARTS_OF_MICROSECOND


def _compute_slices(rank: int, timeline: Timeline) -> Iterator[TraceEvent]:
    """Yield the steps, and the activities of the compute thread in each of them."""
    for step in step_activities(timeline):
        yield _slice(rank, COMPUTE_THREAD, f"step {step.step}", step.start_s, step.end_s)
        for what, start_s, end_s in step.activities:
            yield _slice(rank, COMPUTE_THREAD, what, start_s, end_s)


class _Lanes:
    """Threads of one rank for slices that may overlap; each slice goes on the first free one."""

    def __init__(self, rank: int, first: int, name: str) -> None:
        self._rank, self._first, self._name = rank, first, name
        self._free_from_s: list[float] = []

    def put(self, name: str, start_s: float, end_s: float, more: TraceEvent) -> Iterator[TraceEvent]:
        """Yield the slice, after the name of its thread where the thread is new."""
        free = (lane for lane, free_s in enumerate(self._free_from_s) if free_s <= start_s)
        lane = next(free, len(self._free_from_s))
        if lane == len(self._free_from_s):
            self._free_from_s.append(end_s)
            number = f" {lane + 1}" if lane else ""
            yield _name("thread_name", self._rank, self._first + lane, self._name + number)
        self._free_from_s[lane] = end_s
        yield _slice(self._rank, self._first + lane, name, start_s, end_s) | more


def _operation_slices(rank: int, timeline: Timeline, flows: Mapping[OperationId, TraceEvent]) -> Iterator[TraceEvent]:
    """Yield the communication operations of a rank."""
    lanes = _Lanes(rank, COMMUNICATION_THREAD, "communication")
    for place, row in enumerate(timeline.operations):
        kind = RowKind(int(row["kind"]))
        more = flows.get((rank, place), {}) | {"args": _operation_args(kind, row)}
        yield from lanes.put(kind.title, float(row["start_s"]), float(row["end_s"]), more)


def _operation_args(kind: RowKind, row: Any) -> TraceEvent:
    peer = int(row["peer"])
    role = {RowKind.SEND: "to", RowKind.RECV: "from"}.get(kind, "root")
    about = {"step": int(row["step"]), "bytes": int(row["bytes"]), "carries": Purpose(int(row["purpose"])).title}
    return about if peer == NO_PEER else about | {role: peer}


def _marks(rank: int, run: RunRecord) -> Iterator[TraceEvent]:
    """Yield events other than steps: evaluations, garbage collections, ends of epochs."""
    lanes = _Lanes(rank, MARKS_THREAD, "other events")
    for mark in sorted(run.marks.get(rank, []), key=lambda mark: mark.start_s):
        args = {"args": {"what": mark.detail}} if mark.detail else {}
        if mark.end_s > mark.start_s:
            yield from lanes.put(mark.kind, mark.start_s, mark.end_s, args)
        else:  # An instant event.
            at = {"pid": rank, "tid": COMPUTE_THREAD, "ts": _microseconds(mark.start_s)}
            yield {"ph": "i", "s": "t", "name": mark.kind, **at, **args}


def _resource_counters(rank: int, run: RunRecord) -> Iterator[TraceEvent]:
    """Yield CPU and memory use of the process, as counters."""
    samples = run.resources.get(rank)
    if samples is None:
        return
    for time_s, share in zip(*cpu_shares(samples), strict=True):
        yield _counter(rank, "CPU, %", float(time_s), round(100 * float(share), 1))
    for time_s, size in zip(samples["time_s"], samples["resident_bytes"], strict=True):
        yield _counter(rank, "memory, MB", float(time_s), round(float(size) / 1e6, 1))
    for name, column, scale in (("GPU, %", "gpu_busy", 100), ("GPU power, W", "gpu_power_w", 1)):
        for time_s, value in zip(samples["time_s"], samples[column], strict=True):
            if math.isfinite(value):
                yield _counter(rank, name, float(time_s), round(scale * float(value), 1))


def _counter(rank: int, name: str, time_s: float, value: float) -> TraceEvent:
    return {"ph": "C", "pid": rank, "name": name, "ts": _microseconds(time_s), "args": {"": value}}


def _flows(timelines: Mapping[int, Timeline]) -> dict[OperationId, TraceEvent]:
    """Return the flow arrows that connect one operation's slices on all ranks, from the rank that arrived first."""
    groups: dict[tuple[Any, ...], list[tuple[float, OperationId]]] = defaultdict(list)
    for rank, timeline in timelines.items():
        seen: dict[tuple[Any, ...], int] = defaultdict(int)
        for place, row in enumerate(timeline.operations):
            key = _operation_key(rank, row)
            groups[*key, seen[key]].append((float(row["start_s"]), (rank, place)))
            seen[key] += 1
    flows: dict[OperationId, TraceEvent] = {}
    numbers = itertools.count(1)
    for key, members in groups.items():
        if len(members) != (2 if key[1] == "message" else len(timelines)) or len(members) < 2:
            continue
        number = next(numbers)
        for order, (_, member) in enumerate(sorted(members)):
            flows[member] = {"bind_id": number, "flow_in" if order else "flow_out": True}
    return flows


def _operation_key(rank: int, row: Any) -> tuple[Any, ...]:
    """Return a key that is equal for the parts of one operation on all ranks.

    The nth occurrence of a key in a step is the same operation on every rank.
    """
    kind, step, peer, size = RowKind(int(row["kind"])), int(row["step"]), int(row["peer"]), int(row["bytes"])
    if kind is RowKind.SEND:
        return step, "message", rank, peer, size
    if kind is RowKind.RECV:
        return step, "message", peer, rank, size
    return step, kind, peer, size
