"""Ctrl-C at every line of a command: the runs measured so far are reported, without a traceback."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typer.main import get_command

import paceline
from experiments_on_disk import PROVENANCE, write_run
from paceline.cli import main
from paceline.cli.interrupts import SIGNALS, CtrlCHandler
from paceline.cli.main import app
from paceline.errors import RankError
from paceline.launch.job import Job
from paceline.launch.launcher_process import RankRange
from paceline.records.experiment.design import Candidate
from paceline.records.experiment.record import read_experiment

pytestmark = pytest.mark.takes(15)

SOURCES = Path(paceline.__file__).parent
COMMAND = [
    SOURCES / name
    for name in (
        "cli/main.py",
        "cli/experiment_output.py",
        "cli/interrupts.py",
        "experiments/engine.py",
        "experiments/compare.py",
        "launch/leader.py",
    )
]
DISPLAY = [SOURCES / "report/live/live_table.py", SOURCES / "report/live/run.py"]
SCALING = [SOURCES / "experiments" / name for name in ("points.py", "scaling/experiment.py")]
QUICK = ("--steps", "8", "--no-doctor", "--no-proof", "--repeats", "2", "--out", "out")
COMPARE = ("compare", *QUICK, "--strategies", "allreduce,ddp", "--ranks", "2", "--batch", "32", "--max-repeats", "2")
SCALE = ("scale", *QUICK, "--strategies", "ddp", "--ranks", "1,2", "--batch-per-rank", "16", "--mode", "weak")
FOREVER = 10**9


@dataclass
class Keyboard:
    """Presses Ctrl-C before one of the watched lines runs, and `again` times more at the function calls after it."""

    files: frozenset[str]
    at: int = FOREVER
    """Index of that line in `lines`."""
    again: int = 0
    lines: list[str] = field(default_factory=list)
    """Watched lines that were reached, in order."""

    def watch(self) -> None:
        """Record lines from now on, also in the functions that are on the stack."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = self._trace if frame.f_code.co_filename in self.files else None
            frame = frame.f_back
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line" and not _is_done():
            self.lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            if len(self.lines) - 1 == self.at:
                sys.settrace(None)
                if self.again:
                    sys.setprofile(self._press_again)
                signal.raise_signal(signal.SIGINT)
        return self._trace

    def _press_again(self, *_: Any) -> None:
        if not self.again or _is_done():
            sys.setprofile(None)
            return
        self.again -= 1
        signal.raise_signal(signal.SIGINT)


def _is_done() -> bool:
    """Return whether no command handles Ctrl-C any more; it would then end the test process."""
    return not isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), CtrlCHandler)


@pytest.fixture(autouse=True)
def _work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder, without estimates, data and rendered pages."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for module in ("training_targets", "scale"):
        monkeypatch.setattr(f"paceline.experiments.{module}.run_trials", lambda _: {})
    for module in ("training_targets", "points"):
        monkeypatch.setattr(f"paceline.experiments.{module}.prepare_data", lambda _: None)
    # Built once: typer would build the command again for each call.
    monkeypatch.setattr(sys.modules["paceline.cli.main"], "app", get_command(app))
    monkeypatch.setattr("paceline.report.page.comparison.render", lambda _: "page")
    monkeypatch.setattr("paceline.report.page.scaling.render_scaling", lambda _: "page")
    monkeypatch.setattr(CtrlCHandler, "_raised_s", -math.inf)
    # A busy machine may be slow between two presses.
    monkeypatch.setattr("paceline.cli.interrupts.REPEAT_WINDOW_S", 1e9)
    handlers, trace = {number: signal.getsignal(number) for number in SIGNALS}, sys.gettrace()
    yield
    sys.setprofile(None)
    sys.settrace(trace)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def write_runs(job: Job, part: RankRange) -> None:
    """Write the records of a job as ranks that finished all runs would."""
    for config, folder in job.runs:
        candidate = Candidate(config.strategy, config.strategy)
        losses = [1 / (1 + step) for step in range(config.steps or 0)]
        write_run(folder.path, candidate, config, part.ranks, losses, 0.01, None, PROVENANCE)


def run_command(
    arguments: Sequence[str], keyboard: Keyboard, monkeypatch: pytest.MonkeyPatch, *, from_start: bool = False
) -> object:
    """Run a command and return its exit code.

    The keyboard watches lines once the records of the first job are on disk; with `from_start`, only until then.
    """

    def start_ranks(job: Job, part: RankRange, *_: Any, **__: Any) -> dict[int, int]:
        write_runs(job, part)
        if from_start:
            sys.settrace(None)
        else:
            keyboard.watch()
        return {}

    monkeypatch.setattr("paceline.launch.leader.start_ranks", start_ranks)
    shutil.rmtree("out", ignore_errors=True)
    monkeypatch.setattr(CtrlCHandler, "_raised_s", -math.inf)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if from_start:
            keyboard.watch()
        with pytest.raises(SystemExit) as exited:
            main(list(arguments))
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    return exited.value.code


def lines_to_press_at(
    arguments: Sequence[str], files: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> dict[int, str]:
    """Return each line that a command runs after its first measurement, by its index in `Keyboard.lines`.

    A line may run many times, and all of them would take minutes: every other line counts at its first run, the rest at
    their last.
    """
    for _ in range(2):  # The first call also imports modules.
        keyboard = Keyboard(files)
        assert run_command(arguments, keyboard, monkeypatch) == 0
    last = {line: number for number, line in enumerate(keyboard.lines)}
    first = {line: number for number, line in reversed(list(enumerate(keyboard.lines)))}
    return {(last if place % 2 else first)[line]: line for place, line in enumerate(last)}


@pytest.mark.timeout(900)  # 10 s on an idle machine.
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Open files are closed when the process ends.
@pytest.mark.parametrize(
    ("arguments", "files", "terminal", "every"),
    [
        pytest.param(COMPARE, COMMAND, False, 3, id="compare, at every third line"),
        pytest.param(COMPARE, COMMAND, False, 1, id="compare", marks=pytest.mark.soak),
        pytest.param(SCALE, SCALING, False, 1, id="scale"),
        pytest.param(COMPARE, DISPLAY, True, 1, id="display"),
    ],
)
def test_ctrl_c_at_any_line_reports_the_runs_so_far(
    arguments: Sequence[str],
    files: Sequence[Path],
    terminal: bool,
    every: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    watched = frozenset(map(str, files))
    pressed = lines_to_press_at(arguments, watched, monkeypatch)
    assert {Path(line.partition(":")[0]) for line in pressed.values()} == set(files)
    capfd.readouterr()
    for number, (at, line) in enumerate(list(pressed.items())[::every]):
        keyboard = Keyboard(watched, at, again=number % 3 * 100)
        code = run_command(arguments, keyboard, monkeypatch)
        printed = capfd.readouterr()
        where = f"{line}\n{printed.out}{printed.err}"
        assert keyboard.lines[-1] == line, where
        assert code == 130, where
        assert Path("out/report.html").read_text() == "page", where
        assert "report: out/report.html" in printed.out, where
        assert "Traceback" not in printed.err, where
        assert any(measured.run.finished for measured in read_experiment(Path("out")).runs), where
        assert not [thread for thread in threading.enumerate() if thread.name == "paceline-display"], where
        assert printed.err.count("\x1b[?25l") <= printed.err.count("\x1b[?25h"), where  # The cursor is shown again.


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_ctrl_c_before_the_first_measurement_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = (
        "cli/options.py",
        "cli/compare.py",
        "cli/experiment_requests.py",
        "cli/experiment_output.py",
        "experiments/compare.py",
        "experiments/engine.py",
    )
    watched = frozenset(str(SOURCES / name) for name in files)
    for _ in range(2):  # The first call also imports modules.
        keyboard = Keyboard(watched)
        assert run_command(COMPARE, keyboard, monkeypatch, from_start=True) == 0
    capfd.readouterr()
    lines = {line: at for at, line in enumerate(keyboard.lines)}
    for number, (line, at) in enumerate(list(lines.items())[::3]):
        keyboard = Keyboard(watched, at, again=number % 2 * 100)
        code = run_command(COMPARE, keyboard, monkeypatch, from_start=True)
        printed = capfd.readouterr()
        where = f"{line}\n{printed.out}{printed.err}"
        assert keyboard.lines[-1] == line, where
        assert code == 130, where
        assert "Traceback" not in printed.err, where
        begun = Path("out/experiment.json").exists()
        assert "interrupted" in printed.err or (begun and "report: out/report.html" in printed.out), where


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_ctrl_c_after_a_run_prints_its_summary_or_its_folder(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("train", "--steps", "8", "--ranks", "2", "--strategy", "ddp", "--out", "out")
    files = ("cli/train.py", "cli/record_output.py", "experiments/train.py")
    watched = frozenset(str(SOURCES / name) for name in files)
    monkeypatch.setattr("paceline.experiments.train.prepare_data", lambda _: None)
    monkeypatch.setattr("paceline.report.terminal.run.print_run", lambda _, console: console.print("summary"))
    for at, line in lines_to_press_at(arguments, watched, monkeypatch).items():
        capfd.readouterr()
        code = run_command(arguments, Keyboard(watched, at, again=50), monkeypatch)
        printed = capfd.readouterr()
        where = f"{line}\n{printed.out}{printed.err}"
        assert code == 130, where
        assert "interrupted; the record so far is in out" in printed.err or printed.out == "summary\n", where
        assert "Traceback" not in printed.err, where


def test_an_error_after_ctrl_c_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may catch the KeyboardInterrupt; ranks that SIGINT ended then look like a failure."""
    monkeypatch.setattr("paceline.cli.interrupts.REPEAT_WINDOW_S", 0.0)
    with CtrlCHandler() as ctrl_c:
        with pytest.raises(RankError), ctrl_c.errors_are_interrupts():
            raise RankError("rank 1 was killed by SIGKILL.")
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), ctrl_c.errors_are_interrupts():
            raise RankError("rank 0 was killed by SIGINT.")


def test_ctrl_c_is_only_recorded_during_clean_up_and_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.interrupts.REPEAT_WINDOW_S", 0.0)
    stopped = []

    def measure() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            stopped.append("ranks")

    with CtrlCHandler() as ctrl_c:
        with pytest.raises(KeyboardInterrupt):
            measure()
        assert stopped == ["ranks"]
        ctrl_c.defer()
        signal.raise_signal(signal.SIGINT)
    assert ctrl_c.pressed


def test_ctrl_c_that_code_swallowed_can_be_pressed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.interrupts.REPEAT_WINDOW_S", 0.0)
    with CtrlCHandler():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_ctrl_c_several_times_in_a_row_counts_once() -> None:
    with CtrlCHandler():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")]
)
def test_a_deferred_signal_prints_one_message(
    number: signal.Signals, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    signal.signal(number, signal.SIG_DFL)
    with CtrlCHandler() as ctrl_c:
        ctrl_c.defer()
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert capfd.readouterr().err == f"{name} received: finishing, measured data is kept\n"
    assert ctrl_c.exit_code == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.default_int_handler], ids=["ignored", "not"])
def test_a_command_that_was_started_with_a_signal_ignored_ignores_it(number: signal.Signals, before: Any) -> None:
    signal.signal(number, before)
    with CtrlCHandler():
        assert (signal.getsignal(number) is signal.SIG_IGN) == (before is signal.SIG_IGN)
    assert signal.getsignal(number) is before


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_between_jobs_report_the_runs_so_far(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While ranks run, torch's launcher handles these signals; between jobs the command does."""
    signal.signal(number, signal.SIG_DFL)
    jobs: list[Job] = []

    def start_ranks(job: Job, part: RankRange, *_: Any, **__: Any) -> dict[int, int]:
        if jobs:
            signal.raise_signal(number)
        jobs.append(job)
        write_runs(job, part)
        return {}

    monkeypatch.setattr("paceline.launch.leader.start_ranks", start_ranks)
    with pytest.raises(SystemExit) as exited:
        main(list(COMPARE))
    printed = capfd.readouterr()
    assert (exited.value.code, len(jobs)) == (130, 1)
    assert "report: out/report.html" in printed.out
    assert "Traceback" not in printed.err
    assert len([measured for measured in read_experiment(Path("out")).runs if measured.run.finished]) == 2


def test_an_error_that_a_library_raises_on_ctrl_c_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def start_ranks(job: Job, part: RankRange, *_: Any, **__: Any) -> dict[int, int]:
        write_runs(job, part)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ZeroDivisionError("raised by a library") from None
        return {}

    monkeypatch.setattr("paceline.launch.leader.start_ranks", start_ranks)
    with pytest.raises(SystemExit) as exited:
        main(list(COMPARE))
    printed = capfd.readouterr()
    assert exited.value.code == 130
    assert "report: out/report.html" in printed.out
    assert "Traceback" not in printed.err
