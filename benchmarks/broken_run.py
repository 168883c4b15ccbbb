"""A run on emulated hosts that is broken again and again, and goes on."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from faults import FaultKind, RunningHost, Victims, choose

from paceline.launch.emulation.hosts import EmulatedHost
from paceline.records.events import RUN_EVENTS, LogEvent, ResumedEvent, RunEvent, events_of, read_events
from paceline.records.schema import EVENTS_FILE

FOLDER = Path(__file__).parent
BATCH, WINDOW, HANG_S, LR, MOMENTUM = 12, 5, 6, 0.02, 0.9
PROGRESS_STEPS = 20
"""Steps that a run must train before the next fault."""
LIMIT_S = 120.0
"""Seconds within which a run must make progress again."""
STRATEGIES = ("ddp", "allreduce", "ring", "bucketed", "priority")


@dataclass(frozen=True)
class Survived:
    """A fault, and how the run went on."""

    kind: str
    step: int
    how: str
    """`without a restart`, `restarted` or `started again`."""
    recovered_s: float
    """Seconds until the run trained a new step."""
    named: bool
    """Whether a message named the fault."""

    @property
    def sentence(self) -> str:
        """Line for the terminal."""
        unnamed = "" if self.named else ", not named"
        return f"step {self.step}: {self.kind}; {self.how}, trains on after {self.recovered_s:.1f} s{unnamed}"


@dataclass(frozen=True)
class Use:
    """Resources of host 0's launcher after a fault."""

    launcher: int
    """PID."""
    fault: int
    resident_kb: float
    descriptors: int


@dataclass
class BrokenRun:
    """A run on emulated hosts that is broken again and again."""

    hosts: Sequence[EmulatedHost]
    folder: Path
    random: random.Random
    running: list[RunningHost] = field(default_factory=list)
    survived: list[Survived] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    starts: int = 0

    @property
    def record(self) -> Path:
        """Folder of the run."""
        return self.folder / "run"

    @property
    def ledger(self) -> Path:
        """Folder in which ranks write down what they train."""
        return self.folder / "ledger"

    def start(self) -> None:
        """Start the command on all hosts; it goes on from its newest checkpoint."""
        self.starts += 1
        options = f"--emulate {len(self.hosts)} --ranks-per-host 1 --batch {BATCH} --steps 1000000"
        recipe = f"--optimizer sgd --lr {LR} --momentum {MOMENTUM} --weight-decay 0 --schedule constant"
        faults = f"--resume auto --max-restarts 100000 --min-hosts 1 --hang-timeout {HANG_S} --checkpoint-every 15"
        strategy = f"--strategy {self.random.choice(STRATEGIES)} --log-every {WINDOW}"
        words = f"train endurance_workload:make_workload {options} {recipe} {faults} {strategy}".split()
        command = (sys.executable, "-m", "paceline", *words, "--out", str(self.record))
        env = os.environ | {"PACELINE_LEDGER": str(self.ledger), "TMPDIR": str(self.folder / "temporary")}
        self.running = []
        for number, host in enumerate(self.hosts):
            output = self.folder / f"start-{self.starts}-host-{number}.txt"
            with output.open("w") as stream:
                process = host.popen(*command, env=env, cwd=FOLDER, stdout=stream, stderr=stream)
            self.running.append(RunningHost(host, process, output))

    def stop(self) -> None:
        """Ask the run to stop, unless it has ended, and wait for all hosts; repair their links."""
        for host in self.running:
            if host.is_cut_off:
                host.launcher.kill()
                host.set_link("up")
        self.running[0].launcher.terminate()
        self.wait_until(lambda: all(host.launcher.poll() is not None for host in self.running), "all launchers end")

    def kill(self) -> None:
        """Kill what still runs, after an error."""
        for host in self.running:
            host.launcher.kill()
            host.launcher.wait()
            if host.is_cut_off:
                host.set_link("up")

    def events(self) -> list[RunEvent]:
        """Return the events of the record so far."""
        file = self.record / EVENTS_FILE
        return list(read_events(file, RUN_EVENTS)) if file.exists() else []

    def last_step(self) -> int:
        """Return the last step that was recorded by the attempt that runs, or ran last."""
        logs = events_of(self.events(), LogEvent)
        return logs[-1].step if logs else 0

    def restarts(self) -> int:
        """Return how often the run has gone on from a checkpoint."""
        return len(events_of(self.events(), ResumedEvent))

    def break_once(self) -> None:
        """Inject a fault, and wait until the run trains on."""
        victims = Victims(self.running, self.ledger, self.random)
        kind = choose(victims)
        step, resumed = self.last_step(), self.restarts()
        printed = [host.output.stat().st_size for host in self.running]
        began_s = time.monotonic()
        kind.inject(victims)
        outputs = [host.output for host in self.running]
        if kind.ends_run:
            self.wait_until(lambda: self.running[0].launcher.poll() is not None, f"{kind.name}: host 0 ends")
            self.stop()
            self.start()
            how = "started again"
        else:
            how = self._wait_for_restart(kind, resumed, step)
        if kind.ends_run or how == "restarted":
            self.wait_until(lambda: self.restarts() > resumed, f"{kind.name}: the run resumes")
        self.wait_until(lambda: self.last_step() > step, f"{kind.name}: a step after {step}")
        text = "".join(_read_from(file, start) for file, start in zip(outputs, printed, strict=True))
        named = bool(kind.named_as.search(text))
        self.survived.append(Survived(kind.name, step, how, time.monotonic() - began_s, named))
        self._note_use()

    def _wait_for_restart(self, kind: FaultKind, resumed: int, step: int) -> str:
        def went_on() -> bool:
            return self.restarts() > resumed or (kind.may_heal and self.last_step() > step + 2 * PROGRESS_STEPS)

        self.wait_until(went_on, f"{kind.name}: a restart")
        return "restarted" if self.restarts() > resumed else "without a restart"

    def train_on(self) -> None:
        """Let the run train, so that it has a checkpoint to go on from."""
        begin = self.last_step()
        self.wait_until(lambda: self.last_step() >= begin + PROGRESS_STEPS, f"{PROGRESS_STEPS} steps after {begin}")
        time.sleep(self.random.uniform(0, 1))

    def watch_ranks(self, seconds: float) -> list[tuple[float, float]]:
        """Let the run train undisturbed; return the resident memory of all its ranks in kB, by time in seconds."""
        ranks = [rank for host in self.running if host.is_in_run for rank in host.ranks]
        began_s, samples = time.monotonic(), []
        while (time_s := time.monotonic() - began_s) < seconds:
            samples.append((time_s, sum(rank.memory_info().rss for rank in ranks) / 1024))
            time.sleep(0.5)
        return samples

    def renew(self) -> None:
        """Start the command again with all hosts, if fewer than two are left."""
        if len([host for host in self.running if host.is_in_run]) < 2:
            self.stop()
            self.start()

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait; raise `AssertionError` after the time limit, with the end of host 0's output."""
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            if time.monotonic() > deadline:
                tails = [f"{host.output.name}: {host.output.read_text()[-1500:]}" for host in self.running]
                raise AssertionError("\n".join([f"not within {LIMIT_S:.0f} s: {what}", *tails]))
            time.sleep(0.1)

    def _note_use(self) -> None:
        launcher = psutil.Process(self.running[0].launcher.pid)
        used = Use(launcher.pid, len(self.survived), launcher.memory_info().rss / 1024, launcher.num_fds())
        self.uses.append(used)


def _read_from(file: Path, start: int) -> str:
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read().decode(errors="replace")
