"""Run `paceline` commands in separate processes, in the folder of the users' modules.

Most of the time of a command is the import of torch. Each command, and each rank and emulated host that it starts, is
therefore forked from a process that has imported it.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paceline.doctor import contention, examine, measuring_cost
from paceline.experiments import estimate
from preloaded import SERVER, run_here, script_here, torchrun_here

USER_CODE = Path(__file__).parent / "user_code"
LIMIT_S = 150
OBSERVED_S, COST_S, CONTENTION_S = 0.05, 1.0, 0.4
"""Seconds in which commands measure what tests need less precisely than users do: the machine for the estimate of the
run time; the cost of events and the contention for the doctor."""
Setup = Callable[[], object] | None
TORCHRUN = "torchrun"
PRELOADED_RANKS = {"train": 4, "doctor": 4, "report": 0}
MOST_PRELOADED_RANKS = 20
"""Ranks that are forked for a command, by its name, and for others: to fork one takes 10 ms, to import torch 2 s."""


def paceline(
    *arguments: str, expect: int = 0, cwd: Path = USER_CODE, ranks: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command, or a script that starts emulated hosts, and check its exit code."""
    with forked(*arguments, cwd=cwd, ranks=ranks) as started:
        done = started.wait()
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def torchrun(*arguments: str, cwd: Path = USER_CODE) -> subprocess.CompletedProcess[str]:
    """Run two processes under torchrun on this host: `-m paceline …`, or a script; check that they succeed."""
    return paceline(TORCHRUN, "--standalone", "--nproc-per-node", "2", *arguments, cwd=cwd, ranks=2)


class Forked:
    """Running command that was forked from the server."""

    def __init__(self, folder: Path, cwd: Path, arguments: tuple[str, ...], setup: Setup, ranks: int) -> None:
        self._arguments = arguments
        self._output_files = folder / "stdout", folder / "stderr"
        given = (arguments, cwd, dict(os.environ), setup, ranks, *self._output_files)
        self.process = SERVER.Process(target=_run, args=given)
        self.process.start()

    @property
    def pid(self) -> int:
        """PID of the process of the command."""
        assert self.process.pid is not None
        return self.process.pid

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait for the command; return its exit code and output."""
        self.process.join(LIMIT_S)
        self.process.kill()  # This also ends its ranks, if it has not ended by itself.
        self.process.join()
        assert self.process.exitcode is not None
        stdout, stderr = (file.read_text() for file in self._output_files)
        return subprocess.CompletedProcess(self._arguments, self.process.exitcode, stdout, stderr)


@contextmanager
def forked(*arguments: str, cwd: Path = USER_CODE, setup: Setup = None, ranks: int | None = None) -> Iterator[Forked]:
    """Start a command, and kill it at the end of the `with` block if it still runs.

    Its process calls `setup` first, a function that can be pickled. `ranks` is the number of ranks that it starts
    during its life, if it is known to be another than `PRELOADED_RANKS`.
    """
    count = PRELOADED_RANKS.get(arguments[0], MOST_PRELOADED_RANKS) if ranks is None else ranks
    with tempfile.TemporaryDirectory() as folder:
        started = Forked(Path(folder), cwd, arguments, setup, count)
        try:
            yield started
        finally:
            started.process.kill()
            started.process.join()


def measure_briefly() -> None:
    """Make this command, and the preloaded ranks that it starts, measure in less time."""
    estimate.OBSERVED_S = OBSERVED_S
    examine.measure_cost = partial(measuring_cost.measure_cost, budget_s=COST_S)
    examine.measure_contention = partial(contention.measure_contention, budget_s=CONTENTION_S)


def _run(
    arguments: tuple[str, ...],
    cwd: Path,
    environment: dict[str, str],
    setup: Setup,
    ranks: int,
    stdout: Path,
    stderr: Path,
) -> None:
    """Run `python -m paceline` in the forked process."""
    gc.freeze()  # Collections skip the imported modules, here and in the preloaded processes.
    os.setsid()  # A new process group, as a shell makes.
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout, sys.stderr = stdout.open("a"), stderr.open("a", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    mp.set_start_method(None, force=True)  # The default of a new process, not that of the fork server.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under nohup.
    measure_briefly()
    if setup is not None:
        setup()
    if arguments[0] == TORCHRUN:
        torchrun_here(arguments[1:], ranks)
    elif arguments[0].endswith(".py"):
        script_here(arguments, ranks)
    else:
        run_here(arguments, ranks)


def command(*arguments: str) -> list[str]:
    """Return the command line of a `paceline` command."""
    return [sys.executable, "-m", "paceline", *arguments]


def wait_until(holds: Callable[[], Any], what: str) -> None:
    """Wait until a condition holds; fail after `LIMIT_S`."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.05)
