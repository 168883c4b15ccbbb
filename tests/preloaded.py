"""Processes that start with torch and Paceline already imported; the imports take 3 s of CPU time.

`SERVER` forks such processes. A command that it forked starts its ranks, and its emulated hosts, from
`PreloadedProcesses`: processes that are forked before the command has threads, and then wait until they become one.
They are child processes of the command, like all ranks and hosts.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing as mp
import os
import pkgutil
import platform
import runpy
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import paceline

PACKAGE = [
    module.name
    for module in pkgutil.walk_packages(paceline.__path__, "paceline.")
    if module.name != "paceline.__main__"
]
IMPORTED_LATE = ["torch._dynamo", "torch.utils.flop_counter", "numpy.ma", "rich.progress", "typer._adapters"]
"""Modules that commands and ranks import when they first need them."""
SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload(["__main__", *PACKAGE, *IMPORTED_LATE])
RANKS_OF_HOST = 4
"""Ranks that a preloaded emulated host starts from preloaded processes."""
_MESSAGE_BYTES = 1 << 17
_MOST_FILES = 16


class PreloadedProcesses:
    """Child processes of this command that wait to become a rank or a host; further ones are new processes."""

    def __init__(self, count: int) -> None:
        self._socket, waiting_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for _ in range(count):
            if os.fork() == 0:
                self._socket.close()
                _wait_and_run(waiting_socket)
        waiting_socket.close()

    def start(self, arguments: Sequence[str], environment: dict[str, str], files: Sequence[int] = ()) -> int | None:
        """Run a command line of Python in a waiting process; return its PID, None if no process is left.

        The process gets duplicates of `files`, the first three as its standard input, output and errors.
        """
        try:
            socket.send_fds(self._socket, [json.dumps([arguments, environment]).encode()], files)
            return int(self._socket.recv(_MESSAGE_BYTES) or 0) or None
        except OSError:
            return None


def _wait_and_run(requests: socket.socket) -> NoReturn:
    """Wait for the arguments that `PreloadedProcesses.start` sends, and run them; exit when the command has ended."""
    os.setsid()  # Before it waits, so that signals to the process group of the command do not end it.
    request, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, _MOST_FILES)
    if not request:
        os._exit(0)
    requests.send(str(os.getpid()).encode())
    requests.close()
    arguments, environment = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    for place, file in enumerate(files[:3]):
        os.dup2(file, place)
        os.close(file)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    _show_as(arguments)
    try:
        if arguments[0] == "-u":  # A process that torchrun starts.
            _run_under_torchrun(arguments[1:])
        elif arguments[0] == "-m":
            _run_rank(*arguments[1:])
        else:
            _run_host(arguments, files[3:])
    finally:
        os._exit(1)  # Only reached after an error: both exit by themselves.


def _show_as(arguments: Sequence[str]) -> None:
    """Show these arguments in lists of processes: write them over the longer command line of the server."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    start, end = int(fields[45]), int(fields[46])  # `arg_start` and `arg_end`.
    line = b"\0".join(argument.encode() for argument in (sys.executable, *arguments))[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _run_rank(module: str, *arguments: str) -> None:
    """Run `python -m MODULE …`."""
    import torch

    # torch reads this variable only when it is imported.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.path.insert(0, str(os.getcwd()))  # noqa: PTH109  (same as `python -m`)
    sys.argv = ["", *arguments]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run_under_torchrun(arguments: Sequence[str]) -> None:
    """Run `python -m paceline …` or `python SCRIPT …`."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if os.environ.get("PYTHONWARNINGS") == "error":  # Python reads this variable only when it starts.
        warnings.simplefilter("error")
    try:
        if arguments[:2] == ["-m", "paceline"]:
            sys.path.insert(0, str(os.getcwd()))  # noqa: PTH109  (same as `python -m`)
            run_here(arguments[2:], RANKS_OF_HOST)
        else:
            sys.argv = [*arguments]
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))  # noqa: PTH100, PTH120
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exited:
        code = exited.code
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    os._exit(int(code or 0))


def torchrun_here(arguments: Sequence[str], preloaded: int) -> None:
    """Run `torchrun …` in this process, which has no threads yet."""
    use_preloaded(preloaded)
    sys.argv = ["torchrun", *arguments]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


def script_here(arguments: Sequence[str], preloaded: int) -> None:
    """Run `python SCRIPT …`, which starts emulated hosts, in this process, which has no threads yet."""
    use_preloaded(preloaded)
    script = Path(arguments[0])
    sys.argv = [*arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _run_host(arguments: Sequence[str], namespaces: Sequence[int]) -> None:
    """Run `enter.py PARENT FD,FD -- python -m paceline …` with other descriptors of the same namespaces."""

    def run_program(_: str, program: Sequence[str]) -> NoReturn:
        platform._uname_cache = None  # type: ignore[attr-defined]  # It has the name of the real host.
        try:
            run_here(program[3:], RANKS_OF_HOST)
        except SystemExit as exited:
            sys.stdout.flush()
            os._exit(int(exited.code or 0))
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    script, parent, _, *program = arguments
    sys.argv = [script, parent, ",".join(map(str, namespaces)), *program]
    os.execvp = run_program
    runpy.run_path(script, run_name="__main__")


def run_here(arguments: Sequence[str], preloaded: int) -> None:
    """Run `paceline …` in this process, which has no threads yet."""
    from paceline.cli import main

    sys.argv = ["paceline", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # As in a new process.
    use_preloaded(preloaded)
    main()


def use_preloaded(count: int) -> None:
    """Make this process start its first `count` ranks and emulated hosts from preloaded processes."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from paceline.launch.emulation import namespaces

    waiting = PreloadedProcesses(count)

    class PreloadedRank(subprocess.Popen[str]):
        """`Popen` of a rank that runs in a preloaded process, or in a new one if none is left."""

        def _execute_child(self, args: Any, *rest: Any) -> None:
            pid = waiting.start(list(args[1:]), rest[5])
            if pid is None:
                super()._execute_child(args, *rest)  # type: ignore[misc]
            else:
                self.pid, self._child_created = pid, True

    class PreloadedHost(subprocess.Popen[str]):
        """`Popen` of `paceline` on an emulated host, in a preloaded process; of other programs in a new one."""

        def _execute_child(self, args: Any, *rest: Any) -> None:
            pid, pass_fds, environment, ends = None, rest[3], rest[5], rest[9:15]
            if "paceline" in args:
                stdio = [own if end == -1 else end for own, end in enumerate((ends[0], ends[3], ends[5]))]
                pid = waiting.start([str(arg) for arg in args[3:]], environment, [*stdio, *pass_fds])
            if pid is None:
                super()._execute_child(args, *rest)  # type: ignore[misc]
            else:
                self.pid, self._child_created = pid, True
                self._close_pipe_fds(*ends)  # type: ignore[attr-defined]

    subprocess_handler.Popen = PreloadedRank  # type: ignore[misc]
    namespaces.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": PreloadedHost})  # type: ignore[assignment]
