"""Find the root cause of a failed job: each rank that fails writes an error file, and the launcher reads them all.

When one rank fails, the others fail shortly after it because they lose the connection. The root cause is a rank that
was killed by a signal, otherwise the first failure that is not the loss of a peer.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.errors import ERRORS_BY_NAME, PacelineError, RankError, is_peer_lost
from paceline.formatting import size
from paceline.launch.faults.native_crash import (
    collective_in_stack,
    native_cause,
    place_in_stack,
    read_stack,
    size_mismatch,
)
from paceline.records import RunFolder
from paceline.records.decoder import read_model
from paceline.records.failure import ErrorInfo, RankFailure
from paceline.records.growing_file import disk_is_full
from paceline.records.writer import write_json

_WRAPPER = "'DistributedDataParallel' object"
_GLOO_ADVICE = ". This is typically caused"
"""Start of the general advice that Gloo appends to the loss of a connection."""
_SAME_COLLECTIVES_HINT = (
    "call the same collectives on all ranks, in the same order, with tensors of the same size; "
    "--check-collectives names both calls where ranks differ; "
)
_MEMORY_ERRORS = ("OutOfMemoryError", "MemoryError")
"""Exceptions of torch and Python that mean a lack of memory."""
_MEMORY_PHRASES = (
    "DefaultCPUAllocator: ",  # RuntimeError of torch: "can't allocate memory", "not enough memory".
    "std::bad_alloc",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",
)
"""Parts of other messages that mean a lack of memory."""
_SMALLER_BATCH_HINT = "use a smaller batch, --accumulate, or more ranks; "
FULL_DISK_EXIT_CODE = 74
"""Exit code of a rank that could not write its error file because the disk is full: EX_IOERR of sysexits.h."""
_CAUSES_OF_SIGNALS = {
    signal.SIGSEGV: "native code accessed memory that it must not access: a bug in an extension, or in a library; ",
    signal.SIGBUS: "native code accessed memory that does not exist: shared memory (/dev/shm) or a disk may be full; ",
    signal.SIGILL: "native code used an instruction that this processor lacks; ",
    signal.SIGFPE: "native code divided an integer by zero; ",
    signal.SIGXCPU: "the limit of CPU time was reached (ulimit -t); ",
    signal.SIGXFSZ: "the limit of file size was reached (ulimit -f); ",
}


def record_failure(error: BaseException, rank: int, file: Path, run: int | None = None) -> None:
    """Write why this rank failed, and in which run of the job, to its error file.

    Raise `RecordError` if the disk is full.
    """
    known = isinstance(error, PacelineError)
    failure = RankFailure(
        rank=rank,
        run=run,
        time_ns=time.time_ns(),
        kind=type(error).__name__,
        known=known,
        message=str(error),
        hint=error.hint if isinstance(error, PacelineError) else None,
        detail=error.detail if isinstance(error, PacelineError) else traceback.format_exc().rstrip(),
        peer_lost=error.peer_lost if isinstance(error, RankError) else not known and is_peer_lost(error),
    )
    write_json(file, failure)


def find_root_cause(exit_codes: Mapping[int, int], folder: RunFolder, ranks: Iterable[int]) -> PacelineError:
    """Return the error to show for a failed job.

    `exit_codes` are those of the failed ranks, by rank; a negative code is the number of a signal. `ranks` are all
    ranks of the job.
    """
    files = [folder.error_file(rank) for rank in ranks]
    failures = [read_model(file, RankFailure, "error") for file in files if file.exists()]
    failures.sort(key=lambda failure: (failure.peer_lost, failure.time_ns))
    error = _root_cause(exit_codes, failures, folder, ranks)
    error.run = failures[0].run if failures else None
    return error


def error_to_info(error: BaseException) -> ErrorInfo:
    """Return an error as a message to other hosts."""
    message = str(error) or type(error).__name__
    if isinstance(error, PacelineError):
        return ErrorInfo(kind=type(error).__name__, message=message, hint=error.hint, detail=error.detail)
    return ErrorInfo(kind=PacelineError.__name__, message=message)


def error_from_info(info: ErrorInfo) -> PacelineError:
    """Return the error in a message from another host."""
    return ERRORS_BY_NAME[info.kind](info.message, hint=info.hint, detail=info.detail)


def _root_cause(
    exit_codes: Mapping[int, int], failures: list[RankFailure], folder: RunFolder, ranks: Iterable[int]
) -> PacelineError:
    killed = [rank for rank, code in sorted(exit_codes.items()) if code < 0 and -code != signal.SIGTERM]
    if killed:
        return _killed_error(killed[0], -exit_codes[killed[0]], folder, failures)
    if FULL_DISK_EXIT_CODE in exit_codes.values():
        return disk_is_full(folder.path)
    if not failures:
        rank, code = min(exit_codes.items())
        return RankError(f"rank {rank} ended with exit code {code}.", hint=_log_hint(rank, folder))
    if not failures[0].peer_lost:
        return _recorded_error(failures[0], folder)
    failed = {failure.rank for failure in failures}
    return _peer_lost_error(failures, [rank for rank in ranks if rank not in failed], folder)


def _killed_error(rank: int, number: int, folder: RunFolder, failures: list[RankFailure]) -> RankError:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    stack, cause = read_stack(folder.log_file(rank)), native_cause(folder.log_file(rank))
    stacks = {failure.rank: failure.detail for failure in failures if failure.peer_lost} | {rank: stack}
    hint = _CAUSES_OF_SIGNALS.get(signal.Signals(number), "") if number in set(signal.Signals) else ""
    found = ""
    sizes = size_mismatch(cause or "")
    if sizes is not None:
        where = _where_ranks_were(stacks)
        found = ": ranks called different collectives, or the same one with different sizes"
        found += f" (a message of {size(sizes[0])} arrived instead of {size(sizes[1])}{f'; {where}' if where else ''})"
        hint = _SAME_COLLECTIVES_HINT
    elif cause is not None and number == signal.SIGABRT:
        found = f": {cause.rstrip('.')}"
    if number == signal.SIGKILL:
        found = ", probably because the host ran out of memory"
        hint = f"if the host ran out of memory, {_SMALLER_BATCH_HINT}"
    return RankError(
        f"rank {rank} was killed by {name}{found}.",
        hint=hint + _log_hint(rank, folder),
        detail=stack,
        out_of_memory="probably" if number == signal.SIGKILL else _means_no_memory(found),
    )


def _where_ranks_were(stacks: Mapping[int, str | None]) -> str:
    """Return in words which collective each rank was in, and at which line of the user's code, as far as known."""
    known = []
    for rank, stack in sorted(stacks.items()):
        collective = collective_in_stack(stack or "")
        if collective is not None:
            place = place_in_stack(stack or "")
            known.append(f"rank {rank} was in {collective}" + (f" at {place}" if place else ""))
    return ", ".join(known)


def _recorded_error(failure: RankFailure, folder: RunFolder) -> PacelineError:
    rank = failure.rank
    if failure.known:
        return error_from_info(failure)
    message = f"{failure.kind}: {failure.message}" if failure.message else failure.kind
    if failure.kind in _MEMORY_ERRORS or _means_no_memory(message):
        hint = _SMALLER_BATCH_HINT + _log_hint(rank, folder)
        # CUDA's message goes on with the use of the GPU's memory, which the log has.
        found = f"rank {rank} ran out of memory: {message.splitlines()[0].partition(' GPU ')[0].rstrip('.')}."
        return RankError(found, detail=failure.detail, hint=hint, out_of_memory=True)
    wrapped = "a strategy may wrap the model: call only model(…) in the step; " if _WRAPPER in message else ""
    return RankError(f"rank {rank} failed: {message}", detail=failure.detail, hint=wrapped + _log_hint(rank, folder))


def _means_no_memory(message: str) -> bool:
    return any(phrase in message for phrase in _MEMORY_PHRASES)


def _peer_lost_error(failures: list[RankFailure], unresponsive: list[int], folder: RunFolder) -> RankError:
    """Return the error of a rank that lost its peers: names the ranks that did not respond, with the stack of one.

    If the ranks were in different collectives, it also says in which.
    """
    failure = failures[0]
    rank, found = failure.rank, failure.message.splitlines()[0].rpartition("] ")[2].partition(_GLOO_ADVICE)[0]
    stacks = {failure.rank: failure.detail for failure in failures} | {
        other: read_stack(folder.log_file(other)) for other in unresponsive
    }
    collectives = {collective_in_stack(stack) for stack in stacks.values() if stack}
    where, advice = "", ""
    if len(collectives - {None}) > 1:
        where, advice = _where_ranks_were(stacks), _SAME_COLLECTIVES_HINT
    if not unresponsive:
        return RankError(
            f"rank {rank} lost the connection to another rank: {found}{f'; {where}' if where else ''}.",
            hint=advice + _log_hint(rank, folder),
        )
    stack = stacks[unresponsive[0]]
    above = "" if stack is None else f"the stack of rank {unresponsive[0]} is above; "
    names = ("rank " if len(unresponsive) == 1 else "ranks ") + ", ".join(map(str, unresponsive))
    return RankError(
        f"rank {rank} stopped waiting for other ranks ({found}); {names} did not respond.",
        hint=f"{above}{f'{where}: {advice}' if where else ''}increase --timeout if it is only slow; "
        + _log_hint(unresponsive[0], folder),
        detail=stack,
    )


def _log_hint(rank: int, folder: RunFolder) -> str:
    return f"the output of rank {rank} is in {folder.log_file(rank)}"
