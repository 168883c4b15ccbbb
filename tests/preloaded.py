"""Processes that begin with torch imported, which would cost each of them 2.5 s of processor time.

`SERVER` forks processes that have it. `Spares` lets a command that was forked so start its ranks the same way. They are
forked before the command has threads, are children of the command as other ranks are, and wait until torch's elastic
launcher asks for a rank.
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
SPARES = 20
"""Ranks that a command starts at most this way; those beyond are new processes."""
_MESSAGE_BYTES = 1 << 17


class Spares:
    """Processes that become ranks of the command that this process runs."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for _ in range(SPARES):
            if os.fork() == 0:
                self._ours.close()
                _wait_and_become_a_rank(theirs)
        theirs.close()

    def take(self, arguments: list[str], environment: dict[str, str]) -> int | None:
        """Let a spare run `python -m MODULE …`; return its process number, None where no spare is left."""
        try:
            self._ours.send(json.dumps([arguments, environment]).encode())
            return int(self._ours.recv(_MESSAGE_BYTES) or 0) or None
        except OSError:
            return None


def _wait_and_become_a_rank(requests: socket.socket) -> NoReturn:
    """Wait for what to run, as `take` sends it; leave when the command has ended."""
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

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # Read from the environment when torch is imported.
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.path.insert(0, str(os.getcwd()))  # noqa: PTH109  (as `python -m` has it)
    sys.argv = ["", *rest]
    sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        os._exit(1)  # A rank leaves by itself.


def start_ranks_from_spares() -> None:
    """Have torch's elastic launcher in this process take spares for ranks."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    spares = Spares()

    class FromSpare(subprocess.Popen[str]):
        """A rank that was a spare: a child of this process like any other."""

        def _execute_child(self, args: Any, *rest: Any) -> None:
            pid = spares.take(list(args[1:]), rest[5])
            if pid is None:
                super()._execute_child(args, *rest)  # type: ignore[misc]
            else:
                self.pid, self._child_created = pid, True

    subprocess_handler.Popen = FromSpare  # type: ignore[misc]
