"""Starts the ranks of one seat through torch's elastic launcher and waits for them."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from paceline.errors import LaunchError
from paceline.launch import rendezvous
from paceline.launch.job import Job
from paceline.launch.launcher_process import RankRange
from paceline.launch.rank import LOCAL_RANK, LOCAL_SIZE, MODULE, SHARING
from paceline.launch.rendezvous import Failed
from paceline.measure.cores import threads_per_rank

GRACE_S = 3.0
"""How long ranks get to notice by themselves, and to say so, that ranks elsewhere have failed."""
POLL_S = 0.2
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What torch's launcher ends for; what we were started to ignore, as by nohup, it leaves ignored.

Ctrl-C is not among them: the command handles it itself. Its KeyboardInterrupt passes through the launcher, which then
ends the ranks.
"""


def start_ranks(
    job: Job,
    rank_range: RankRange,
    endpoint: str,
    *,
    store: Store | None,
    threads: int | None,
    failed_elsewhere: Failed,
) -> dict[int, int]:
    """Starts a seat's ranks, returns when all are done: how those that failed ended (negative: the signal), by rank.

    The seat of rank 0 brings the store that the others connect to, and keeps it until they are done.
    """
    _silence_elastic()
    rendezvous.register(store, failed_elsewhere)
    elastic = ElasticConfig(
        min_nodes=rank_range.rank_ranges,
        max_nodes=rank_range.rank_ranges,
        nproc_per_node=rank_range.ranks,
        run_id="paceline",
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint=endpoint,
        rdzv_configs={"rank": rank_range.number, "timeout": math.ceil(job.timeout)},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle=",".join(number.name for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN),
    )
    environment = {
        "OMP_NUM_THREADS": str(threads or threads_per_rank(rank_range.sharing)),
        LOCAL_RANK: str(rank_range.local_rank),
        LOCAL_SIZE: str(rank_range.local_size),
        SHARING: str(rank_range.sharing),
    }
    try:
        with _environment(environment), _own_signal_handlers(), _ended_with_the_others(failed_elsewhere):
            elastic_launch(elastic, sys.executable)("-m", MODULE, str(job.file))
    except ChildFailedError as error:
        return {rank_range.first_rank + failure.local_rank: failure.exitcode for failure in error.failures.values()}
    except KeyboardInterrupt:
        _end_ranks(job)
        raise
    except SignalException:
        raise KeyboardInterrupt from None
    except (RuntimeError, ConnectionError) as error:
        raise LaunchError(f"the ranks could not be started: {str(error).splitlines()[0]}") from error
    return {}


def _end_ranks(job: Job) -> None:
    """Kill ranks that the launcher does not know of because it was interrupted while starting them."""
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if str(job.file) in process.cmdline():
                process.kill()


def _silence_elastic() -> None:
    """Keeps the elastic launcher from printing every failure and signal: we explain the one that counts."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _ended_with_the_others(failed_elsewhere: Failed) -> Iterator[None]:
    """Ends our ranks a moment after some have failed elsewhere: they may wait for these, up to their time-out."""
    done = threading.Event()

    def watch() -> None:
        while not failed_elsewhere():
            if done.wait(POLL_S):
                return
        if not done.wait(GRACE_S):
            for process in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    process.terminate()

    watcher = threading.Thread(target=watch, daemon=True, name="paceline-watch")
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Puts back the signal handlers that torch's launcher replaces."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Adds variables to the environment that ranks inherit, for the length of a `with`."""
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
