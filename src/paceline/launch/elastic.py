"""Start the ranks of one launcher process with torch's elastic launcher, and wait for them."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from paceline.errors import LaunchError
from paceline.launch import rendezvous
from paceline.launch.faults.process_states import reporting_states
from paceline.launch.faults.stop_signals import STOP_REQUESTS, GracefulStop
from paceline.launch.job import Job
from paceline.launch.launcher_process import RankRange
from paceline.launch.rank import LOCAL_RANK, LOCAL_SIZE, MODULE, RANKS_ON_CORES
from paceline.launch.rendezvous import FailureCheck
from paceline.measure.cores import threads_per_rank
from paceline.signing import Signer

STOP_GRACE_S = 3.0
"""Seconds in which ranks can detect by themselves that ranks on other hosts failed, and report an error."""
KILL_AFTER_S = 3.0
"""Seconds in which ranks can end after SIGTERM. A stopped process never does."""
POLL_S = 0.2
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
"""Signals that stop torch's launcher, except those that this process was started to ignore, as by nohup, and those that
`GracefulStop` handles.

Ctrl-C is not one of them: the command handles it. Its KeyboardInterrupt passes through torch's launcher, which then
stops the ranks.
"""


def start_ranks(
    job: Job,
    rank_range: RankRange,
    endpoint: str,
    *,
    store: Store | None,
    signer: Signer,
    threads: int | None,
    remote_failed: FailureCheck,
    stop: GracefulStop | None = None,
    file: Path | None = None,
) -> dict[int, int]:
    """Start the ranks of a range and wait for all of them.

    Return the exit codes of the ranks that failed, by rank; a negative code is the number of a signal. `store` is the
    store of the job on the launcher of rank 0, which opened it, and None on all others, which connect to it. `signer`
    has the key of the job, by which its ranks recognise each other. `remote_failed` returns whether ranks of another
    launcher failed, and how long these ranks may go on. With `stop`, the ranks can end in order when a signal asks them
    to. They read the job from `file`, by default its own.
    """
    _silence_elastic()
    elastic = ElasticConfig(
        min_nodes=rank_range.group_world_size,
        max_nodes=rank_range.group_world_size,
        nproc_per_node=rank_range.ranks,
        run_id="paceline",
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint=endpoint,
        rdzv_configs={"rank": rank_range.group_rank, "timeout": math.ceil(job.timeout)},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle=",".join(
            number.name
            for number in _STOP_SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN and (stop is None or number not in STOP_REQUESTS)
        ),
    )
    environment = {
        "OMP_NUM_THREADS": str(threads or threads_per_rank(rank_range.ranks_on_cores)),
        LOCAL_RANK: str(rank_range.local_rank),
        LOCAL_SIZE: str(rank_range.local_size),
        RANKS_ON_CORES: str(rank_range.ranks_on_cores),
        **signer.to_environment(),
    }
    children_before = set(psutil.Process().children())
    try:
        with (
            rendezvous.registered(store, signer, remote_failed),
            _environment(environment),
            _restored_signal_handlers(),
            stopped_log_tails(),
            _stop_ranks_on_remote_failure(remote_failed),
            reporting_states(endpoint, signer, rank_range.group_rank, job.hang_timeout),
            nullcontext() if stop is None else stop.handling(terminate_ranks),
        ):
            elastic_launch(elastic, sys.executable)("-m", MODULE, str(file or job.file))
    except ChildFailedError as error:
        if stop is not None and stop.expired:
            raise KeyboardInterrupt from None
        return {rank_range.first_rank + failure.local_rank: failure.exitcode for failure in error.failures.values()}
    except KeyboardInterrupt:
        _kill_children_since(children_before)
        raise
    except SignalException:
        raise KeyboardInterrupt from None
    except (RuntimeError, ConnectionError) as error:
        raise LaunchError(
            f"torch's elastic launcher could not start the ranks: {str(error).splitlines()[0]}",
            hint="see the output of the same command on the other hosts" if rank_range.group_world_size > 1 else None,
        ) from error
    return {}


def _kill_children_since(before: set[psutil.Process]) -> None:
    """Kill ranks that torch's launcher does not track because it was interrupted while starting them.

    They are the new children of this process. Their command line would not tell: it is empty for a moment at the start.
    """
    for process in set(psutil.Process().children()) - before:
        with suppress(psutil.Error):
            process.kill()


def _silence_elastic() -> None:
    """Stop the elastic launcher from logging every failure and signal; Paceline shows only the root cause."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def terminate_ranks() -> None:
    """Send SIGTERM to the ranks of this launcher; torch's launcher then reports them as failed."""
    _signal_ranks(signal.SIGTERM)


def _signal_ranks(number: signal.Signals) -> None:
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextmanager
def _stop_ranks_on_remote_failure(remote_failed: FailureCheck) -> Iterator[None]:
    """Stop this launcher's ranks some time after a remote failure, since they may wait for the failed ranks."""
    done = threading.Event()

    def watch() -> None:
        while (grace_s := remote_failed()) is None:
            if done.wait(POLL_S):
                return
        if not done.wait(grace_s):
            _signal_ranks(signal.SIGQUIT)  # Ranks print their stack, even if native code keeps Python's lock.
            _signal_ranks(signal.SIGTERM)
        if not done.wait(KILL_AFTER_S):
            _signal_ranks(signal.SIGKILL)

    watcher = threading.Thread(target=watch, daemon=True, name="paceline-failure-watch")
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join(STOP_GRACE_S)  # It blocks in the store if the link to host 0 is cut.


@contextmanager
def stopped_log_tails() -> Iterator[None]:
    """Stop on exit the threads in which torch's launcher copies the output of ranks.

    If Ctrl-C arrives while it starts ranks, it loses track of these threads, and this process could not end.
    """
    started: list[TailLog] = []
    start = TailLog.start

    def start_and_keep(tail: TailLog) -> TailLog:
        started.append(tail)
        return start(tail)

    TailLog.start = start_and_keep  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        TailLog.start = start  # type: ignore[method-assign]
        for tail in started:
            tail.stop()


@contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """Restore on exit the signal handlers that torch's launcher replaces."""
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which ranks inherit, for the duration of a `with` block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
