"""Run one command on every host of an emulation, as a user would on real hosts, and wait for all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from paceline.analysis.core_sharing import format_quotas
from paceline.config import LaunchConfig, launched
from paceline.config.emulation import format_hosts, parse_hosts
from paceline.errors import UsageError
from paceline.formatting import format_cores
from paceline.launch.channel.token import new_token
from paceline.launch.emulation.hosts import EmulatedHost, emulated_hosts
from paceline.launch.emulation.network import address_of
from paceline.launch.launcher_process import Notify
from paceline.measure.cores import usable_cores
from paceline.signing import TOKEN_VARIABLE

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
FOLLOWERS_EXIT_S = 15.0
"""Seconds after the exit of host 0 in which the other hosts must exit by themselves."""
LEADER_EXIT_S = 30.0
"""Seconds after the failure of another host in which host 0 must exit by itself, since it reports the cause."""
_TERMINATE_S = 5.0
_MAX_SHOWN_LINES = 30


def run_emulated(
    launch: LaunchConfig, arguments: Sequence[str], notify: Notify, prepare: Callable[[], None] = lambda: None
) -> int:
    """Create the hosts of `launch.emulate` and run `paceline ARGUMENTS` on each; return the exit code of host 0.

    `prepare` is called in this process after the hosts were created: it does what needs other networks, for example
    downloads. Host 0 uses this terminal. The output of another host is shown if it fails and host 0 does not.
    """
    if launched():
        raise UsageError(
            "--emulate was given, but torchrun or another launcher started this process.",
            hint="run the command without the launcher",
        )
    specs = parse_hosts(launch.emulate)
    with emulated_hosts(launch.emulate, launch.host_cpus) as hosts:
        limits = "" if launch.host_cpus is None else f", {format_cores(launch.host_cpus)} each"
        others = f"–{address_of(len(specs) - 1).rpartition('.')[2]}" if len(specs) > 1 else ""
        notify(f"{format_hosts(specs)}{limits}, {address_of(0)}{others}")
        _warn_if_oversubscribed(launch, len(specs), notify)
        prepare()
        program = (sys.executable, "-m", "paceline", *arguments)
        return run_on_all(hosts, program, notify, may_lose_hosts=launch.min_hosts is not None)


def run_on_all(
    hosts: Sequence[EmulatedHost], command: Sequence[str], notify: Notify, *, may_lose_hosts: bool = False
) -> int:
    """Run a program on every host and wait for all; return the exit code of host 0.

    With `may_lose_hosts`, host 0 goes on after the failure of another.
    """
    processes: list[_HostProcess] = []
    # Signals that this process ignores, as under nohup, are ignored on all hosts.
    stop_signals = frozenset(number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)
    with _blocked_signals({*stop_signals, signal.SIGCHLD}):
        try:
            environment = {**os.environ, TOKEN_VARIABLE: new_token()}
            processes += [_start(host, command, environment) for host in hosts]
            running = _HostProcesses(processes, stop_signals, may_lose_hosts=may_lose_hosts)
            code = running.wait()
            running.show_unexplained_failures(notify)
        finally:
            for process in processes:
                process.close()
    return code


def _warn_if_oversubscribed(launch: LaunchConfig, hosts: int, notify: Notify) -> None:
    """Print a warning if the CPU quotas of the hosts exceed the cores; the command itself reports its ranks."""
    sharing = "" if launch.host_cpus is None else format_quotas(hosts, launch.host_cpus, usable_cores())
    if sharing:
        notify(f"warning: {sharing}: they slow each other down; use fewer hosts or a smaller --host-cpus")


@dataclass
class _HostProcess:
    """Process of the command on one host."""

    host: EmulatedHost
    process: subprocess.Popen[str]
    output: IO[str] | None
    """File with its output; None if it prints to this terminal."""
    ended_s: float | None = None

    @property
    def code(self) -> int:
        """Exit code as in a shell: 128 + signal if a signal ended it."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def close(self) -> None:
        """Kill it if it is still running, and close its output file."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.output is not None:
            self.output.close()


def _start(host: EmulatedHost, command: Sequence[str], environment: Mapping[str, str]) -> _HostProcess:
    # An unnamed file, so that none is left behind.
    output = None if host.emulation.host == 0 else tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    process = host.popen(
        *command,
        env=environment,
        stdin=None if output is None else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # A separate process group: only this process receives Ctrl-C, and forwards it once to each host.
        process_group=0,
    )
    return _HostProcess(host, process, output)


class _HostProcesses:
    """Processes of the command on all hosts."""

    def __init__(
        self, processes: Sequence[_HostProcess], stop_signals: Set[signal.Signals], *, may_lose_hosts: bool = False
    ) -> None:
        self.leader, *self.followers = self.processes = list(processes)
        self.may_lose_hosts = may_lose_hosts
        self.stop_signals = stop_signals
        self.received: set[signal.Signals] = set()
        self.terminated_at_s: dict[int, float] = {}

    def wait(self) -> int:
        """Wait for all, forward stop signals, and stop processes whose peers have ended; return host 0's exit code."""
        while self._poll():
            received = signal.sigtimedwait({*self.stop_signals, signal.SIGCHLD}, 0.5)
            if received is not None and received.si_signo in self.stop_signals:
                self._interrupt(signal.Signals(received.si_signo))
            self._stop_orphans(time.monotonic())
        return self.leader.code

    def show_unexplained_failures(self, notify: Notify) -> None:
        """Show the output of hosts that failed before host 0 ended, unless host 0 has the same exit code."""
        for process in self.followers:
            first = (process.ended_s or 0.0) <= (self.leader.ended_s or 0.0)
            if process.code in (0, self.leader.code) or self.received or not first or process.output is None:
                continue
            process.output.seek(0)
            output_lines = process.output.read().rstrip().splitlines()[-_MAX_SHOWN_LINES:]
            name = process.host.namespace.name
            notify(f"{name} ended with exit code {process.code}" + (":" if output_lines else " and printed nothing"))
            for line in output_lines:
                notify(f"  {name}: {line}")

    def _poll(self) -> bool:
        now = time.monotonic()
        for process in self.processes:
            if process.process.poll() is not None and process.ended_s is None:
                process.ended_s = now
        return bool(self._alive())

    def _alive(self) -> list[_HostProcess]:
        return [process for process in self.processes if process.process.returncode is None]

    def _interrupt(self, number: signal.Signals) -> None:
        """Forward a stop signal, so that hosts can clean up; kill the hosts on the second one, unless it is Ctrl-C.

        Ctrl-C is forwarded each time: users press it repeatedly, and host 0 must still report what was measured.
        SIGUSR1 does not count: SIGTERM usually follows it.
        """
        kill = number in (signal.SIGTERM, signal.SIGHUP) and bool(self.received - {signal.SIGUSR1})
        self.received.add(number)
        for process in self._alive():
            process.process.send_signal(signal.SIGKILL if kill else number)

    def _stop_orphans(self, now: float) -> None:
        """Terminate, and later kill, processes that still wait for a host that has ended."""
        # After Ctrl-C all hosts stop, and host 0 has no time limit for its report.
        has_limit = not self.received and not self.may_lose_hosts
        failed = [p.ended_s for p in self.followers if p.ended_s is not None and p.code != 0 and has_limit]
        for process in self._alive():
            if process is self.leader:
                since, limit_s = min(failed, default=None), LEADER_EXIT_S
            else:
                since, limit_s = self.leader.ended_s, FOLLOWERS_EXIT_S
            if since is None or now < since + limit_s:
                continue
            terminated_s = self.terminated_at_s.setdefault(process.host.emulation.host, now)
            if now == terminated_s:
                process.process.terminate()
            elif now > terminated_s + _TERMINATE_S:
                process.process.kill()


@contextmanager
def _blocked_signals(numbers: Set[signal.Signals]) -> Iterator[None]:
    """Block signals for the duration of a `with` block, so that `sigtimedwait` receives them."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        while signal.sigtimedwait(numbers, 0) is not None:  # Discard signals for processes that have ended.
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
