"""Runs `paceline` as a user does: in processes of its own, where the users' modules are.

Most of what a command costs is to import torch. `paceline` therefore forks each command from a server that has it
already; the ranks that the command starts are new processes, as they always are. `start` starts commands from nothing:
those that are signalled, and those on several hosts.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT_S = 150

_server = mp.get_context("forkserver")
_server.set_forkserver_preload(
    ["__main__", "paceline.cli.main", "paceline.launch.elastic", "paceline.training.run", "torch._dynamo"]
)


def paceline(*arguments: str, expect: int = 0, cwd: Path = HERE) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "stdout", Path(folder) / "stderr"
        process = _server.Process(target=_run, args=(arguments, cwd, dict(os.environ), *said))
        process.start()
        try:
            process.join(LIMIT_S)
        finally:
            process.kill()  # And with it its ranks, if it has not ended by itself.
        process.join()
        stdout, stderr = (file.read_text() for file in said)
    assert process.exitcode == expect, stdout + stderr
    return subprocess.CompletedProcess(arguments, expect, stdout, stderr)


def _run(arguments: tuple[str, ...], cwd: Path, environment: dict[str, str], stdout: Path, stderr: Path) -> None:
    """What `python -m paceline` would do, in the process that was forked for it."""
    from paceline.cli import main

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout, sys.stderr = stdout.open("w"), stderr.open("w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    sys.argv = ["paceline", *arguments]
    main()


def start(*arguments: str) -> subprocess.Popen[str]:
    """Starts a command as a shell would: in a process group of its own."""
    return subprocess.Popen(
        command(*arguments),
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
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
