"""Ctrl-C at every line of a command: what was measured is reported, and nothing shows a traceback."""

from __future__ import annotations

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
from paceline.cli.interrupts import CtrlC
from paceline.cli.main import app
from paceline.launch.job import Job
from paceline.launch.launcher_process import RankRange
from paceline.records.experiment import Candidate, read_experiment

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
SCALING = [SOURCES / "experiments/scale.py"]
QUICK = ("--steps", "8", "--no-doctor", "--no-proof", "--repeats", "2", "--out", "out")
COMPARE = ("compare", *QUICK, "--strategies", "allreduce,ddp", "--ranks", "2", "--batch", "32", "--max-repeats", "2")
SCALE = ("scale", *QUICK, "--strategies", "ddp", "--ranks", "1,2", "--batch-per-rank", "16", "--mode", "weak")
FOREVER = 10**9


@dataclass
class Keyboard:
    """Presses Ctrl-C before one of the watched lines is executed, and, if asked, again at every call after it."""

    files: frozenset[str]
    at: int = FOREVER
    """Before which line, counted from 0."""
    again: int = 0
    """How often it is pressed again."""
    lines: list[str] = field(default_factory=list)
    """Those that were reached."""

    def watch(self) -> None:
        """Counts lines from now on, also of the functions that are being called."""
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
    """Whether no command runs, or it has nothing left to do: Ctrl-C would end the process that runs the tests."""
    return not isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), CtrlC)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder to work in, experiments that need no ranks, and pages of one word."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for module in ("paceline.experiments.training_targets", "paceline.experiments.scale"):
        monkeypatch.setattr(f"{module}.estimate_s", lambda *_, **__: None)
        monkeypatch.setattr(f"{module}.prepare_data", lambda _: None)
    monkeypatch.setattr("paceline.launch.handshake._sources", lambda: "these")
    monkeypatch.setattr(sys.modules["paceline.cli.main"], "app", get_command(app))  # It is made anew each time.
    monkeypatch.setattr("paceline.report.page.comparison.render", lambda _: "page")
    monkeypatch.setattr("paceline.report.page.scaling.render_scaling", lambda _: "page")
    monkeypatch.setattr(CtrlC, "_raised_s", -math.inf)
    monkeypatch.setattr("paceline.cli.interrupts.ONCE_S", 1e9)  # A busy machine may take its time between two presses.
    handler, trace = signal.getsignal(signal.SIGINT), sys.gettrace()
    yield
    sys.setprofile(None)
    sys.settrace(trace)
    signal.signal(signal.SIGINT, handler)


def write_runs(job: Job, part: RankRange) -> None:
    """The records of a job whose ranks have done all they should."""
    for config, folder in job.runs:
        candidate = Candidate(config.strategy, config.strategy)
        losses = [1 / (1 + step) for step in range(config.steps or 0)]
        write_run(folder.path, candidate, config, part.ranks, losses, 0.01, None, PROVENANCE)


def type_in(
    arguments: Sequence[str], keyboard: Keyboard, monkeypatch: pytest.MonkeyPatch, *, from_start: bool = False
) -> object:
    """Runs a command; lines count as soon as the first job's runs are on disk. Returns the exit code."""

    def start_ranks(job: Job, part: RankRange, *_: Any, **__: Any) -> dict[int, int]:
        write_runs(job, part)
        if from_start:
            sys.settrace(None)
        else:
            keyboard.watch()
        return {}

    monkeypatch.setattr("paceline.launch.leader.start_ranks", start_ranks)
    shutil.rmtree("out", ignore_errors=True)
    monkeypatch.setattr(CtrlC, "_raised_s", -math.inf)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if from_start:
            keyboard.watch()
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    return left.value.code


def moments(arguments: Sequence[str], files: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Every line that a command executes once it has measured something: of two lines one the first time, one the last.

    All times of all lines would take minutes.
    """
    for _ in range(2):  # The first time it imports.
        keyboard = Keyboard(files)
        assert type_in(arguments, keyboard, monkeypatch) == 0
    last = {line: number for number, line in enumerate(keyboard.lines)}
    first = {line: number for number, line in reversed(list(enumerate(keyboard.lines)))}
    return {(last if place % 2 else first)[line]: line for place, line in enumerate(last)}


@pytest.mark.timeout(900)  # 10 s on an idle machine.
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # What it had open is closed when the process ends.
@pytest.mark.parametrize(
    ("arguments", "files", "terminal"),
    [(COMPARE, COMMAND, False), (SCALE, SCALING, False), (COMPARE, DISPLAY, True)],
    ids=["compare", "scale", "display"],
)
def test_ctrl_c_at_any_line_keeps_what_was_measured_and_reports_it(
    arguments: Sequence[str],
    files: Sequence[Path],
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    watched = frozenset(map(str, files))
    pressed = moments(arguments, watched, monkeypatch)
    assert {Path(line.partition(":")[0]) for line in pressed.values()} == set(files)
    capfd.readouterr()
    for number, (at, line) in enumerate(pressed.items()):
        keyboard = Keyboard(watched, at, again=number % 3 * 100)
        code = type_in(arguments, keyboard, monkeypatch)
        said = capfd.readouterr()
        where = f"{line}\n{said.out}{said.err}"
        assert keyboard.lines[-1] == line, where
        assert code == 130, where
        assert Path("out/report.html").read_text() == "page", where
        assert "report: out/report.html" in said.out, where
        assert "Traceback" not in said.err, where
        assert any(measured.run.finished for measured in read_experiment(Path("out")).runs), where
        assert not [thread for thread in threading.enumerate() if thread.name == "paceline-display"], where
        assert said.err.count("\x1b[?25l") <= said.err.count("\x1b[?25h"), where  # The cursor is there again.


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_ctrl_c_before_anything_was_measured_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = ("cli/options.py", "cli/experiment_output.py", "experiments/compare.py", "experiments/engine.py")
    watched = frozenset(str(SOURCES / name) for name in files)
    for _ in range(2):  # The first time it imports.
        keyboard = Keyboard(watched)
        assert type_in(COMPARE, keyboard, monkeypatch, from_start=True) == 0
    capfd.readouterr()
    lines = {line: at for at, line in enumerate(keyboard.lines)}
    for number, (line, at) in enumerate(list(lines.items())[::3]):
        keyboard = Keyboard(watched, at, again=number % 2 * 100)
        code = type_in(COMPARE, keyboard, monkeypatch, from_start=True)
        said = capfd.readouterr()
        where = f"{line}\n{said.out}{said.err}"
        assert keyboard.lines[-1] == line, where
        assert code == 130, where
        assert "Traceback" not in said.err, where
        begun = Path("out/experiment.json").exists()
        assert "interrupted" in said.err or (begun and "report: out/report.html" in said.out), where


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_ctrl_c_after_a_run_shows_its_summary_or_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("train", "--steps", "8", "--ranks", "2", "--strategy", "ddp", "--out", "out")
    watched = frozenset([str(SOURCES / "cli/train.py"), str(SOURCES / "experiments/train.py")])
    monkeypatch.setattr("paceline.experiments.train.prepare_data", lambda _: None)
    monkeypatch.setattr("paceline.report.terminal.run.print_run", lambda _, console: console.print("summary"))
    for at, line in moments(arguments, watched, monkeypatch).items():
        capfd.readouterr()
        code = type_in(arguments, Keyboard(watched, at, again=50), monkeypatch)
        said = capfd.readouterr()
        where = f"{line}\n{said.out}{said.err}"
        assert code == 130, where
        assert "interrupted; what was done is in out" in said.err or said.out == "summary\n", where
        assert "Traceback" not in said.err, where


def test_ctrl_c_is_noted_while_another_ends_the_command_and_while_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.interrupts.ONCE_S", 0.0)
    ended = []

    def measure() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            ended.append("ranks")

    with CtrlC() as ctrl_c:
        with pytest.raises(KeyboardInterrupt):
            measure()
        assert ended == ["ranks"]
        ctrl_c.hold()
        signal.raise_signal(signal.SIGINT)
    assert ctrl_c.came


def test_ctrl_c_that_got_lost_can_be_pressed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.interrupts.ONCE_S", 0.0)
    with CtrlC():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_ctrl_c_several_times_in_a_row_is_pressed_once() -> None:
    with CtrlC():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_said_to_be_noted_once(capfd: pytest.CaptureFixture[str]) -> None:
    with CtrlC() as ctrl_c:
        ctrl_c.hold()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "Ctrl-C: what was measured is kept, one moment\n"


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.default_int_handler], ids=["ignored", "not"])
def test_a_command_that_was_started_to_ignore_ctrl_c_does(before: Any) -> None:
    signal.signal(signal.SIGINT, before)
    with CtrlC():
        assert (signal.getsignal(signal.SIGINT) is signal.SIG_IGN) == (before is signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_that_a_library_makes_of_ctrl_c_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def start_ranks(job: Job, part: RankRange, *_: Any, **__: Any) -> dict[int, int]:
        write_runs(job, part)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ZeroDivisionError("a library's own") from None
        return {}

    monkeypatch.setattr("paceline.launch.leader.start_ranks", start_ranks)
    with pytest.raises(SystemExit) as left:
        main(list(COMPARE))
    said = capfd.readouterr()
    assert left.value.code == 130
    assert "report: out/report.html" in said.out
    assert "Traceback" not in said.err
