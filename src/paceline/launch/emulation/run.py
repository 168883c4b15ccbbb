"""Runs one command on every host of an emulation, as a user would on real ones, and waits for their end."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from paceline.config import LaunchConfig, launched
from paceline.config.emulation import format_hosts, parse_hosts
from paceline.errors import UsageError
from paceline.launch.emulation.hosts import EmulatedHost, emulated_hosts
from paceline.launch.emulation.network import address_of
from paceline.launch.launcher_process import Notify
from paceline.measure.cores import usable_cores

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FOLLOWERS_END_S = 15.0
"""Host 0 is done: the others have this long to find out."""
LEADER_ENDS_S = 30.0
"""Another host has failed: host 0 has this long to find out and to say why, which it does better than we could."""
_ORDERLY_END_S = 5.0
_SHOWN_LINES = 30


def run_emulated(
    launch: LaunchConfig, arguments: Sequence[str], notify: Notify, before: Callable[[], None] = lambda: None
) -> int:
    """Makes the hosts that `launch` asks for and runs `paceline ARGUMENTS` on each; returns host 0's exit code.

    `before` does out here what cannot be done on hosts that reach each other alone, once it is known that they can be
    made. Host 0 has our terminal. What the others print is shown if they fail and host 0 does not.
    """
    if launched():
        raise UsageError("--emulate was given under another launcher.", hint="start it as a plain command")
    lines = parse_hosts(launch.emulate)
    with emulated_hosts(launch.emulate, launch.host_cpus) as hosts:
        shares = "" if launch.host_cpus is None else f", {launch.host_cpus:g} cores each"
        others = f"–{address_of(len(lines) - 1).rpartition('.')[2]}" if len(lines) > 1 else ""
        notify(f"{format_hosts(lines)}{shares}, {address_of(0)}{others}")
        _warn_of_shares(launch, len(lines), notify)
        before()
        return run_on_all(hosts, (sys.executable, "-m", "paceline", *arguments), notify)


def run_on_all(hosts: Sequence[EmulatedHost], command: Sequence[str], notify: Notify) -> int:
    """Runs a program on every host until all have ended, in order if it can be; returns host 0's exit code."""
    processes: list[_Process] = []
    # What we were started to ignore, as by nohup, is ignored on all hosts.
    ending = frozenset(number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN)
    with _signals_held({*ending, signal.SIGCHLD}):
        try:
            processes += [_start(host, command) for host in hosts]
            running = _Running(processes, ending)
            code = running.wait()
            running.show_unexplained(notify)
        finally:
            for process in processes:
                process.close()
    return code


def _warn_of_shares(launch: LaunchConfig, hosts: int, notify: Notify) -> None:
    asked, cores = (launch.host_cpus or 0) * hosts, usable_cores()
    if asked > cores:
        notify(
            f"warning: {hosts} hosts × {launch.host_cpus:g} cores are {asked:g}, but there are {cores:g}: "
            "hosts will take time from each other"
        )


@dataclass
class _Process:
    """`paceline` on one host."""

    host: EmulatedHost
    process: subprocess.Popen[str]
    output: IO[str] | None
    """Where it prints to; None where that is our own terminal."""
    ended_s: float | None = None

    @property
    def code(self) -> int:
        """Its exit code, as a shell has it."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def close(self) -> None:
        """Ends it at once if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.output is not None:
            self.output.close()


def _start(host: EmulatedHost, command: Sequence[str]) -> _Process:
    # Nameless, so that none is left behind.
    output = None if host.place.host == 0 else tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    process = host.popen(
        *command,
        stdin=None if output is None else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # Out of the terminal's way: Ctrl-C comes to us alone, and each host gets it once, from us.
        process_group=0,
    )
    return _Process(host, process, output)


class _Running:
    """The processes of all hosts, until the last has ended."""

    def __init__(self, processes: Sequence[_Process], ending: Set[signal.Signals]) -> None:
        self.leader, *self.followers = self.processes = list(processes)
        self.ending = ending
        self.interrupts = 0
        self.told_at_s: dict[int, float] = {}

    def wait(self) -> int:
        """Waits for all, passes on what asks us to end, and ends those that have nobody left to work with."""
        while self._look():
            came = signal.sigtimedwait({*self.ending, signal.SIGCHLD}, 0.5)
            if came is not None and came.si_signo in self.ending:
                self._interrupt(signal.Signals(came.si_signo))
            self._hurry(time.monotonic())
        return self.leader.code

    def show_unexplained(self, notify: Notify) -> None:
        """What a host printed that failed by itself, unless host 0 failed in the same way, and has said so."""
        for process in self.followers:
            first = (process.ended_s or 0.0) <= (self.leader.ended_s or 0.0)
            if process.code in (0, self.leader.code) or self.interrupts or not first or process.output is None:
                continue
            process.output.seek(0)
            printed = process.output.read().rstrip().splitlines()[-_SHOWN_LINES:]
            name = process.host.namespace.name
            notify(f"{name} ended with exit code {process.code}" + (":" if printed else ", without a word"))
            for line in printed:
                notify(f"  {name}: {line}")

    def _look(self) -> bool:
        now = time.monotonic()
        for process in self.processes:
            if process.process.poll() is not None and process.ended_s is None:
                process.ended_s = now
        return bool(self._living())

    def _living(self) -> list[_Process]:
        return [process for process in self.processes if process.process.returncode is None]

    def _interrupt(self, number: signal.Signals) -> None:
        """They end in order, as they do on a real host; of what is not Ctrl-C the second ends them at once.

        Ctrl-C is passed on each time: people press it several times, and host 0 reports what was measured all the same.
        """
        self.interrupts += 1
        at_once = self.interrupts > 1 and number != signal.SIGINT
        for process in self._living():
            process.process.send_signal(signal.SIGKILL if at_once else number)

    def _hurry(self, now: float) -> None:
        """Ends, first in order and then at once, who waits for a host that is gone."""
        # After Ctrl-C all end, and host 0 may take its time to report what was measured.
        failed = [p.ended_s for p in self.followers if p.ended_s is not None and p.code != 0 and not self.interrupts]
        for process in self._living():
            if process is self.leader:
                since, patience_s = min(failed, default=None), LEADER_ENDS_S
            else:
                since, patience_s = self.leader.ended_s, FOLLOWERS_END_S
            if since is None or now < since + patience_s:
                continue
            told = self.told_at_s.setdefault(process.host.place.host, now)
            if now == told:
                process.process.terminate()
            elif now > told + _ORDERLY_END_S:
                process.process.kill()


@contextmanager
def _signals_held(numbers: Set[signal.Signals]) -> Iterator[None]:
    """Has signals wait until we ask for them, for the length of a `with`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        while signal.sigtimedwait(numbers, 0) is not None:  # What came last was meant for what has ended.
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
