"""Processes that start with torch already imported; the import takes 2.5 s of CPU time.

`SERVER` forks such processes. A command that it forked starts its ranks from `PreloadedRanks`: processes that are
forked before the command has threads, and then wait until torch's elastic launcher starts a rank. They are child
processes of the command, like all ranks.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import runpy
import socket
import subprocess
import sys
from typing import Any, NoReturn

SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["__main__", "paceline.cli.main", "paceline.launch.elastic", "paceline.training.run", "torch._dynamo"]
)
_MESSAGE_BYTES = 1 << 17


class PreloadedRanks:
    """Child processes of this command that wait to become its ranks; further ranks are new processes."""

    def __init__(self, count: int) -> None:
        self._socket, rank_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for _ in range(count):
            if os.fork() == 0:
                self._socket.close()
                _wait_and_run(rank_socket)
        rank_socket.close()

    def start(self, arguments: list[str], environment: dict[str, str]) -> int | None:
        """Run `python -m MODULE …` in a waiting process; return its PID, None if no process is left."""
        try:
            self._socket.send(json.dumps([arguments, environment]).encode())
            return int(self._socket.recv(_MESSAGE_BYTES) or 0) or None
        except OSError:
            return None


def _wait_and_run(requests: socket.socket) -> NoReturn:
    """Wait for the arguments that `PreloadedRanks.start` sends, and run them; exit when the command has ended."""
    request = requests.recv(_MESSAGE_BYTES)
    if not request:
        os._exit(0)
    os.setsid()
    requests.send(str(os.getpid()).encode())
    requests.close()
    (_, module, *rest), environment = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    # torch reads this variable only when it is imported.
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.path.insert(0, str(os.getcwd()))  # noqa: PTH109  (same as `python -m`)
    sys.argv = ["", *rest]
    sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        os._exit(1)  # Only reached after an error: a rank exits by itself.


def use_preloaded_ranks(count: int) -> None:
    """Make torch's elastic launcher in this process start its first `count` ranks from preloaded processes."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    preloaded_ranks = PreloadedRanks(count)

    class PreloadedPopen(subprocess.Popen[str]):
        """`Popen` of a rank that runs in a preloaded process, or in a new one if none is left."""

        def _execute_child(self, args: Any, *rest: Any) -> None:
            pid = preloaded_ranks.start(list(args[1:]), rest[5])
            if pid is None:
                super()._execute_child(args, *rest)  # type: ignore[misc]
            else:
                self.pid, self._child_created = pid, True

    subprocess_handler.Popen = PreloadedPopen  # type: ignore[misc]
