"""Describe a hang in words: what each rank waits in, and where the ranks that others wait for were last seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.comm.watchdog.judge import Hang
from paceline.comm.watchdog.status import Frame, OperationStatus, RankStatus, format_stack
from paceline.errors import HangError
from paceline.formatting import short, short_seconds, size
from paceline.measure.activity import IDLE
from paceline.user_code import is_of_library, is_of_torch, is_of_user

STOPPED_STATES = ("T", "t")
"""Letters of the kernel for a process that a signal or a debugger has stopped."""
SHOWN_FRAMES = 8
_C10D = "distributed_c10d.py"
_ENGINE = "_engine_run_backward"
_BACKWARD = "in the backward pass"
_TO_PEER = {"send": "to", "recv": "from", "broadcast": "from", "scatter": "from", "gather": "to", "reduce": "to"}
_WAS = "\0"
"""Place of a verb whose number is not known yet; no file name contains it."""
_LONGER = 5
"""Factor by which the time-out that a hint proposes is longer."""


@dataclass(frozen=True)
class Surroundings:
    """Facts about ranks that are not in their statuses."""

    states: Mapping[int, str] = field(default_factory=dict)
    """State of a rank's process, as the kernel's letter."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """Name of the host of each rank; empty if there is only one."""
    native_stacks: Mapping[int, str] = field(default_factory=dict)
    """Stacks that faulthandler wrote, of ranks that did not answer."""
    checks_collectives: bool = False
    """Whether ranks compare operations before they run."""
    in_program: bool = False
    """Whether the user's program has called `attach` itself, so that settings are its arguments."""

    def option(self, name: str, value: str = "") -> str:
        """Return a setting as the user writes it; an empty value for a switch."""
        if self.in_program:
            return f"attach(…, {name}={value or True})"
        return " ".join([f"--{name.replace('_', '-')}", *([value] if value else [])])

    @property
    def check_hint(self) -> str:
        """Advice that helps to find a mismatch of operations; empty if the user follows it."""
        if self.checks_collectives:
            return ""
        return f"{self.option('check_collectives')} names both calls where ranks differ"


def hang_error(hang: Hang, around: Surroundings, stacks_file: Path | None) -> HangError:
    """Return the error for a hang; the stacks of all ranks are in `stacks_file`."""
    blocked = [rank for rank in hang.statuses if not is_waiting(rank, hang)]
    hint = _hint(hang, blocked, around)
    if stacks_file is not None:
        hint += f"; the stacks of all ranks are in {stacks_file}"
    detail = _shown_stack(blocked[0], hang, around) if blocked else None
    return HangError(f"{when(hang)}: {sentence(hang, around)}.", hint=hint, detail=detail)


def sentence(hang: Hang, around: Surroundings) -> str:
    """Return what each rank does, without a full stop: first those that wait, then those that they wait for."""
    waiting: dict[str, list[int]] = {}
    others: dict[str, list[int]] = {}
    for rank, status in hang.statuses.items():
        if is_waiting(rank, hang):
            waiting.setdefault(_wait_in_words(status) + _other_step(status, hang), []).append(rank)
        else:
            others.setdefault(_last_seen(rank, hang, around), []).append(rank)
    parts = [f"{rank_names(ranks)} {_verb(ranks, 'waits', 'wait')} in {what}" for what, ranks in waiting.items()]
    parts += [
        f"{rank_names(ranks)} {what.replace(_WAS, _verb(ranks, 'was', 'were'))}" for what, ranks in others.items()
    ]
    return "; ".join(parts)


def all_stacks(hang: Hang, around: Surroundings) -> str:
    """Return the status and the stack of every rank, for a file."""
    parts = []
    for rank, status in hang.statuses.items():
        does = f"waits in {_wait_in_words(status)}" if is_waiting(rank, hang) else _last_seen(rank, hang, around)
        lines = [
            f"rank {rank} {does.replace(_WAS, 'was')}",
            "stack, most recent call first:",
            format_stack(status.frames),
        ]
        if rank in around.native_stacks:
            lines += ["stack when it was ended:", around.native_stacks[rank]]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def is_waiting(rank: int, hang: Hang) -> bool:
    """Return whether a rank waits for others in an operation, and does nothing else."""
    status = hang.statuses[rank]
    if rank in hang.silent_s or status.is_busy:
        return False
    if status.phase == IDLE:
        return True
    if status.operation is not None:
        return not (status.frames and is_of_user(status.frames[0].file))
    return _collective_of(status.frames) is not None


def rank_names(ranks: Iterable[int]) -> str:
    """Return ranks in words, as in "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(runs) == len(runs[0]) == 1 else "ranks ") + ", ".join(texts)


def when(hang: Hang) -> str:
    """Return the step of a hang, in words."""
    step = _first_step(hang)
    return "before the first step" if step is None else f"step {step}"


def _first_step(hang: Hang) -> int | None:
    """Return the step of the rank that is furthest behind, of those whose status is not old."""
    steps = {rank: status.step for rank, status in hang.statuses.items() if status.step is not None}
    return min(
        (step for rank, step in steps.items() if rank not in hang.silent_s), default=min(steps.values(), default=None)
    )


def _other_step(status: RankStatus, hang: Hang) -> str:
    return "" if status.step in (None, _first_step(hang)) else f", in step {status.step}"


def _wait_in_words(status: RankStatus) -> str:
    place = _user_place(status.frames)
    at = f" at {place}" if place else ""
    if status.operation is None:
        if status.phase == IDLE:
            return "no operation: the strategy gives it no work"
        return f"{_collective_of(status.frames)}{at}"
    operation = status.operation
    details = [*_number_in_words(operation, status.phase), *_peers_in_words(operation)]
    if operation.bytes:
        details.insert(1 if _number_in_words(operation, status.phase) else 0, size(operation.bytes))
    return operation.kind + (f" ({', '.join(details)})" if details else "") + at


def _number_in_words(operation: OperationStatus, phase: str) -> list[str]:
    if operation.purpose != "gradients":
        return [f"of {operation.purpose}"]
    if operation.kind not in ("send", "recv") and (phase == _BACKWARD or operation.kind == "shared_reduce"):
        return [f"bucket {operation.number}"]
    return [f"operation {operation.number + 1} of the step"]


def _peers_in_words(operation: OperationStatus) -> list[str]:
    if operation.peer is not None:
        return [f"{_TO_PEER.get(operation.kind, 'with')} rank {operation.peer}"]
    return [f"with {rank_names(operation.members)}"] if operation.members else []


def _last_seen(rank: int, hang: Hang, around: Surroundings) -> str:
    """Return where a rank was last seen, with a mark for the verb."""
    status, state = hang.statuses[rank], around.states.get(rank, "")
    host = f" on {around.hosts[rank]}" if rank in around.hosts else ""
    seen = f"last seen {_doing(status)}{_other_step(status, hang)}, {short_seconds(round(hang.stalled_s[rank]))} ago"
    if state in STOPPED_STATES:
        return f"is stopped (process {status.pid}{host}, state {state}), and {_WAS} {seen}"
    if rank in hang.silent_s:
        found = "its process holds Python's lock in native code" if state else f"nothing arrives from its process{host}"
        return f"does not answer ({found}), and {_WAS} {seen}"
    computes = ", where it computes" if status.is_busy else ""
    return f"{_WAS} {seen}{computes}"


def _doing(status: RankStatus) -> str:
    frame = _innermost(status.frames)
    where = "" if frame is None else f"in {frame.function} ({Path(frame.file).name}:{frame.line})"
    return ", ".join(part for part in (where, status.phase) if part)


def _hint(hang: Hang, blocked: list[int], around: Surroundings) -> str:
    stopped = [rank for rank in blocked if around.states.get(rank, "") in STOPPED_STATES]
    if stopped:
        return "find out what stopped the process: a debugger, job control (Ctrl-Z) or a scheduler"
    if any(rank in hang.silent_s and not around.states.get(rank) for rank in blocked):
        return "check that its host runs and that the network reaches it"
    if blocked:
        longer = around.option("hang_timeout", short(hang.timeout_s * _LONGER))
        return f"if {rank_names(blocked)} really {_verb(blocked, 'takes', 'take')} that long here, use {longer}"
    operations = {_kind_of(status) for status in hang.statuses.values()}
    if len(operations) > 1:
        check = f": {around.check_hint}" if around.check_hint else ""
        return f"call the same collectives on all ranks, in the same order{check}"
    check = f", or they sent tensors of different sizes ({around.check_hint})" if around.check_hint else ""
    return f"the connection between some of these ranks may be interrupted (`paceline doctor` tests all links){check}"


def _kind_of(status: RankStatus) -> tuple[object, ...]:
    """Return what tells an operation from others that the same ranks might be in at the same time."""
    operation = status.operation
    if operation is None:
        return (_collective_of(status.frames), _user_place(status.frames))
    # A send and the receive that it waits for are not different calls.
    kind = "message" if operation.kind in ("send", "recv") else operation.kind
    return (kind, operation.number if kind != "message" else 0, operation.step)


def _shown_stack(rank: int, hang: Hang, around: Surroundings) -> str:
    if rank in around.native_stacks:
        return f"rank {rank}, when it was ended:\n{around.native_stacks[rank]}"
    return f"rank {rank} (most recent call first):\n{format_stack(list(hang.statuses[rank].frames[:SHOWN_FRAMES]))}"


def _collective_of(frames: list[Frame]) -> str | None:
    """Return the innermost function of torch.distributed in a stack; None if there is none.

    A rank that is in `backward()` and does not compute waits there, as for the buckets of DDP.
    """
    if frames and frames[0].function == _ENGINE and is_of_torch(frames[0].file):
        return "backward"
    found = next((frame.function for frame in frames if frame.file.endswith(_C10D)), None)
    return None if found is None else found.removeprefix("_")


def _user_place(frames: list[Frame]) -> str | None:
    frame = next((frame for frame in frames if is_of_user(frame.file)), None)
    return None if frame is None else f"{Path(frame.file).name}:{frame.line}"


def _innermost(frames: list[Frame]) -> Frame | None:
    """Return the innermost call of the user's code, else of Paceline's, else of any."""
    own = (frame for frame in frames if not is_of_library(frame.file))
    return next((frame for frame in frames if is_of_user(frame.file)), next(own, frames[0] if frames else None))


def _verb(ranks: list[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several
