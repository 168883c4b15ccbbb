"""Starts the ranks of this host through torch's elastic launcher and waits for them."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from paceline.config import LaunchConfig
from paceline.errors import LaunchError
from paceline.launch import rendezvous
from paceline.launch.failures import explain
from paceline.launch.job import Job
from paceline.measure.cores import threads_per_rank
from paceline.records.schema import FINISHED_FILE


def launch(job: Job, config: LaunchConfig, local_ranks: int) -> None:
    """Starts this host's ranks and returns when all of them are done; raises the reason of the first that failed."""
    _silence_elastic()
    listener = rendezvous.bind(config.master) if config.node_rank == 0 else None
    if listener is not None:
        endpoint = "{}:{}".format(*listener.getsockname()[:2])
    else:
        endpoint = "{}:{}".format(*rendezvous.parse_master(config.master or ""))
    rendezvous.register(listener)
    elastic = ElasticConfig(
        min_nodes=config.hosts,
        max_nodes=config.hosts,
        nproc_per_node=local_ranks,
        run_id="paceline",
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint=endpoint,
        rdzv_configs={"rank": config.node_rank, "timeout": math.ceil(job.timeout)},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    environment = {"OMP_NUM_THREADS": str(job.threads or threads_per_rank(local_ranks))}
    first_rank = config.node_rank * local_ranks
    try:
        with _environment(environment), _own_signal_handlers():
            elastic_launch(elastic, sys.executable)("-m", "paceline.launch.rank", str(job.write()))
    except ChildFailedError as error:
        if not _all_finished(job):
            codes = {first_rank + failure.local_rank: failure.exitcode for failure in error.failures.values()}
            raise explain(codes, job.folder, range(first_rank, first_rank + local_ranks), hosts=config.hosts) from None
    except SignalException:
        raise KeyboardInterrupt from None
    except (RuntimeError, ConnectionError) as error:
        found = str(error).splitlines()[0]
        if config.hosts == 1:
            raise LaunchError(f"the ranks could not be started: {found}") from error
        raise LaunchError(
            f"the hosts did not meet at {endpoint}: {found}",
            hint=f"start the same command on all {config.hosts} hosts, each with its own --node-rank",
        ) from error


def _silence_elastic() -> None:
    """Keeps the elastic launcher from printing every failure and signal: we explain the one that counts."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _all_finished(job: Job) -> bool:
    """Whether every run did all it set out to do: a process that dies after that has not failed."""
    return all((Path(folder.path) / FINISHED_FILE).exists() for _, folder in job.runs)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Puts back the signal handlers that torch's launcher replaces: after it, Ctrl-C has to be Ctrl-C again."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
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
