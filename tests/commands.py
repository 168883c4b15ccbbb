"""Runs `paceline` as a user does: in processes of its own, where the users' modules are.

Most of what a command costs is to import torch. `paceline` therefore forks each command, and each rank that the command
starts, from a process that has imported it. `start` starts new processes for commands and their ranks: for those whose
whole process group is signalled.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from preloaded import SERVER, start_ranks_from_spares

HERE = Path(__file__).parent / "user_code"
LIMIT_S = 150


def paceline(*arguments: str, expect: int = 0, cwd: Path = HERE) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    with forked(*arguments, cwd=cwd) as started:
        done = started.end()
    assert done.returncode == expect, done.stdout + done.stderr
    return done


class Forked:
    """A command that runs."""

    def __init__(self, folder: Path, cwd: Path, arguments: tuple[str, ...], cores: set[int] | None) -> None:
        self._arguments = arguments
        self._said = folder / "stdout", folder / "stderr"
        self.process = SERVER.Process(target=_run, args=(arguments, cwd, dict(os.environ), cores, *self._said))
        self.process.start()

    @property
    def pid(self) -> int:
        """Of the process that runs it."""
        assert self.process.pid is not None
        return self.process.pid

    def end(self) -> subprocess.CompletedProcess[str]:
        """What it left, once it has come to its end."""
        self.process.join(LIMIT_S)
        self.process.kill()  # And with it its ranks, if it has not ended by itself.
        self.process.join()
        assert self.process.exitcode is not None
        stdout, stderr = (file.read_text() for file in self._said)
        return subprocess.CompletedProcess(self._arguments, self.process.exitcode, stdout, stderr)


@contextmanager
def forked(*arguments: str, cwd: Path = HERE, cores: set[int] | None = None) -> Iterator[Forked]:
    """Starts a command, on some of the cores, and kills it at the end if it still runs then."""
    with tempfile.TemporaryDirectory() as folder:
        started = Forked(Path(folder), cwd, arguments, cores)
        try:
            yield started
        finally:
            started.process.kill()
            started.process.join()


def _run(
    arguments: tuple[str, ...],
    cwd: Path,
    environment: dict[str, str],
    cores: set[int] | None,
    stdout: Path,
    stderr: Path,
) -> None:
    """Do what `python -m paceline` would, in the process that was forked for it."""
    from paceline.cli import main

    if cores is not None:
        os.sched_setaffinity(0, cores)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout, sys.stderr = stdout.open("w"), stderr.open("w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    sys.argv = ["paceline", *arguments]
    mp.set_start_method(None, force=True)  # As in a new process, not as in one of a fork server.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under nohup.
    start_ranks_from_spares()
    main()


def start(*arguments: str, by: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Starts a command as a shell would: in a process group of its own; `by` another that starts it, as nohup."""
    return subprocess.Popen(
        [*by, *command(*arguments)],
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # Whoever runs the tests may have it ignored.
    )


def command(*arguments: str) -> list[str]:
    """The command line."""
    return [sys.executable, "-m", "paceline", *arguments]


def wait_until(holds: Callable[[], Any], what: str) -> None:
    """Waits for something that a process of ours will do."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.05)
