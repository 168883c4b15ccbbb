"""A pool of rank processes for tests, started once per session, so that a distributed test takes milliseconds.

`pool.run(function, ranks, *arguments)` calls a module-level function on the first `ranks` ranks, with a `Comm` of these
ranks as its first argument, and returns their results. If a rank raises, the test fails with that rank's traceback.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing as mp
import os
import socket
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore

from preloaded import SERVER

SIZE = 4
TIMEOUT_S = 120
GROUP_TIMEOUT_S = 30
"""Time-out of the operations of a group."""


class RankFailed(AssertionError):
    """A function failed on a rank of the pool."""


class Pool:
    """`SIZE` processes that share a process group. After a test that ended one of them, new ones are started."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        for rank in range(SIZE):
            ours, theirs = SERVER.Pipe()
            process = SERVER.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
        """Return the function's result on each of the first `ranks` ranks."""
        if not self._processes:
            self._start()
        name = (function.__module__, function.__qualname__)
        for pipe in self._pipes:
            pipe.send((name, ranks, arguments))
        answers = [self._answer(rank) for rank in range(SIZE)]
        failed = [(rank, answer) for rank, (succeeded, answer) in enumerate(answers) if not succeeded]
        if failed:
            raise RankFailed("\n".join(f"rank {rank}:\n{answer}" for rank, answer in failed))
        return [answer for _, answer in answers[:ranks]]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(TIMEOUT_S):
            self.close()
            raise RankFailed(f"rank {rank} did not answer within {TIMEOUT_S} s")
        try:
            answer: tuple[bool, Any] = self._pipes[rank].recv()
        except EOFError:
            self.close()
            raise RankFailed(f"rank {rank} ended") from None
        return answer

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


def _serve(rank: int, port: int, pipe: Connection) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".* multi-threaded, use of fork", DeprecationWarning)  # As in any real rank.
    mp.set_start_method(None, force=True)  # The default of a new process, not that of the fork server.
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # Permits children.
    import torch
    import torch.distributed as dist

    from paceline.comm import close_comm, open_comm

    gc.freeze()  # Collections skip the imported modules.
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    while True:
        (module, name), size, arguments = pipe.recv()
        comm = open_comm(range(size), device=torch.device("cpu"), backend="gloo", timeout_s=GROUP_TIMEOUT_S)
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send((True, None if comm is None else function(comm, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        if comm is not None and comm.group in dist.distributed_c10d._world.pg_map:
            close_comm(comm)  # The function did not close it: it used no strategy, or failed.
        held = [comm]
        del comm
        release_in_background(held)


_releasing: list[threading.Thread] = []
"""Threads of this rank that release groups."""


def release_in_background(held: list[Any]) -> None:
    """Empty a list with the last reference to a `Comm`, in a thread: Gloo waits up to 10 ms for each connection."""
    thread = threading.Thread(target=held.clear, daemon=True)
    thread.start()
    _releasing[:] = [thread, *(other for other in _releasing if other.is_alive())]


def wait_for_released_groups() -> None:
    """Wait until released groups are gone, in functions that count threads, files or objects."""
    while _releasing:
        _releasing.pop().join()
