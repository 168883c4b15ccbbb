"""The command line: output on stdout and stderr, exit codes, and the time of quick commands."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from examinations import examination
from experiments_on_disk import write_experiment
from paceline.cli import main
from paceline.cli.main import run
from paceline.config import LaunchConfig, RunConfig
from paceline.errors import ERRORS_BY_NAME, LaunchError, PacelineError
from paceline.measure.cores import usable_cores
from paceline.records import read_run
from paceline.records.examination import write_examination
from paceline.strategies.base.strategy import NoOptions
from paceline.strategies.registry import ENTRIES, SETS, create, lesson
from tries import eventually

pytestmark = pytest.mark.takes(10)

HELP_LIMIT_S = 0.3


@pytest.fixture(autouse=True)
def _work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, without the environment variables of a rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the lines on stderr of a command that fails before it starts anything."""
    assert run(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert not Path("runs").exists()
    return captured.err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["train", "cmn"], "error: there is no workload 'cmn'.", "did you mean 'cnn'?"),
        (["train", "--strategy", "dpd"], "error: there is no strategy 'dpd'.", "did you mean 'ddp'?"),
        (["train", "--strategy", "ddp:"], "error: 'ddp:' is not a name with options.", "name:key=value"),
        (["train", "--data", "digts"], "error: there is no data set 'digts'.", "did you mean 'digits'?"),
        (["train", "--data", "digits:size=3"], "error: digits takes no options, but size=3 was given.", None),
        (["train", "--bn", "sinc"], "error: --bn cannot be 'sinc'.", "did you mean 'sync'?"),
        (["train", "--lr", "-1"], "error: --lr is -1.0.", "0 or more"),
        (
            ["train", "--trace", "--no-events"],
            "error: --trace was given with --no-events.",
            "consists of the recorded events",
        ),
        (
            ["train", "--batch", "3", "--batch-per-rank", "3"],
            "error: --batch and --batch-per-rank were both given.",
            "",
        ),
        (["train", "--hosts", "2"], "error: --hosts 2 was given without --master.", "--master"),
        (["train", "gone:make"], "error: there is no module 'gone' in", "run the command in the folder"),
        (["train", "--strategy", "gone:Mine"], "error: there is no module 'gone' in", "run the command in the folder"),
        (["train", "--config", "none.toml"], "error: cannot read none.toml: No such file", "TOML"),
        (["strategies", "dpd"], "error: there is no strategy 'dpd'.", "did you mean 'ddp'?"),
        (["train", "--bacth", "3"], "error: No such option: --bacth", "--help"),
        (["train", "--batch", "many"], "error: Invalid value for '--batch'", "--help"),
        (["trian"], "error: No such command 'trian'.", "--help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], error: str, hint: str | None) -> None:
    lines = refused(capsys, *arguments)
    assert lines[0].startswith(error)
    if hint is None:
        assert len(lines) == 1
    else:
        assert lines[1].startswith("hint: ")
        assert hint in lines[1]


@pytest.mark.parametrize(
    ("written", "meant"), [("--bacth", "--batch"), ("--stratgy", "--strategy"), ("--epoch", "--epochs")]
)
def test_a_misspelt_option_suggests_the_nearest(capsys: pytest.CaptureFixture[str], written: str, meant: str) -> None:
    assert meant in refused(capsys, "train", written, "3")[0]


def test_a_misspelt_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'train'" in refused(capsys, "trian")[0]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == importlib.metadata.version("paceline") + "\n"


def test_without_a_command_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    captured = capsys.readouterr()
    assert "Usage:" in captured.out + captured.err
    assert "error:" not in captured.err
    assert "hint:" not in captured.err


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    names = {field.name for kind in (RunConfig, LaunchConfig) for field in fields(kind)} - {"workload"}
    missing = [name for name in names if f"--{name.replace('_', '-')}" not in text]
    assert not missing
    for default in ("[default: 20]", "[default: 256]", "[default: on]", "[default: a new one under runs/]"):
        assert default in text
    assert "--no-reshuffle" in text


def test_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(ENTRIES)]] == list(ENTRIES)
    assert all(ENTRIES[line.split()[0]].summary in line for line in lines[: len(ENTRIES)])
    sets = lines[lines.index("Sets, for --strategies") + 1 :][: len(SETS)]
    assert {line.split()[0]: tuple(line.split(maxsplit=1)[1].split(", ")) for line in sets} == SETS


def test_strategies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["strategies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == [{"name": entry.name, "summary": entry.summary} for entry in ENTRIES.values()]


@pytest.mark.parametrize("name", ENTRIES)
def test_one_strategy(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run(["strategies", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{name}: {ENTRIES[name].summary}\n")
    for heading in ("Idea", "Who sends what to whom", "Cost", "When to use it", "When not", "Options"):
        assert f"\n{heading}" in text
    assert ("Options\n    none" in text) == (create(name).Options is NoOptions)
    assert text.count("p is the number of ranks and M the bytes of the gradients") == ("α" in lesson(name).text)
    assert ("; lg is log2.\n\nOptions" in text) == ("α" in lesson(name).text)


def test_the_options_of_ddp_are_shown_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    run(["strategies", "ddp"])
    text = capsys.readouterr().out
    assert "    ddp:bucket_mb=25.0  (float)\n        Bucket size in MiB" in text
    assert "    ddp:overlap=True  (bool)\n" in text


def test_one_strategy_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["strategies", "ddp", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["name"] == "ddp"
    assert "Who sends what to whom" in explained["text"]
    assert [option["name"] for option in explained["options"]] == [
        "bucket_mb",
        "overlap",
        "bucket_view",
        "static_graph",
    ]


class RecordedTrain:
    """Replaces `train`, and records the configs that the command line gave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paceline.experiments.train.train", self)

    def __call__(self, config: RunConfig, launch: LaunchConfig, out: Path | None, *_: object) -> None:
        self.config, self.launch, self.out = config, launch, out


def test_options_become_the_two_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = RecordedTrain(monkeypatch)
    arguments = "vgg11 --batch 64 --lr 0.05 --no-reshuffle --ranks 3 --deterministic --out there"
    assert run(["train", *arguments.split()]) == 0
    assert trained.config == RunConfig(workload="vgg11", batch=64, lr=0.05, reshuffle=False, deterministic=True)
    assert trained.launch == LaunchConfig(ranks=3)
    assert trained.out == Path("there")
    assert run(["train"]) == 0
    assert (trained.config, trained.launch, trained.out) == (RunConfig(), LaunchConfig(), None)


def test_the_command_line_takes_precedence_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = RecordedTrain(monkeypatch)
    Path("mine.toml").write_text('workload = "vgg11"\nlr = 0.5\nmomentum = 0.5\nreshuffle = false\nranks = 3\n')
    assert run(["train", "--config", "mine.toml", "--lr", "0.1", "--reshuffle"]) == 0
    assert trained.config == RunConfig(workload="vgg11", momentum=0.5, lr=0.1)
    assert trained.launch == LaunchConfig(ranks=3)


def test_an_unknown_key_in_the_file_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text("bacth = 3\n")
    lines = refused(capsys, "train", "--config", "mine.toml")
    assert lines[0] == "error: there is no setting (in mine.toml) 'bacth'."
    assert "did you mean 'batch'?" in lines[1]


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b"batch = 0\n", "mine.toml is refused: --batch is 0.", "it must be more than 0"),
        (b'batch = "64"\n', "batch in mine.toml is '64'.", "it takes a whole number"),
        (
            b"batch = 1\nbatch = 2\n",
            "mine.toml is not valid TOML: Cannot overwrite a value (at line 2, column 10).",
            "",
        ),
        (b"batch = 1\n\xe9\n", "mine.toml is not UTF-8 text: byte 0xe9 at position 10.", "save the file as UTF-8"),
        (b"a=" + b"[" * 5_000, "mine.toml is not valid TOML: it is nested too deeply.", ""),
        (b"seed = " + b"9" * 5_000, "mine.toml is not valid TOML: Exceeds the limit", ""),
    ],
    ids=["bound", "type", "twice", "not UTF-8", "nested", "long"],
)
def test_a_file_that_is_wrong_is_one_sentence(
    capsys: pytest.CaptureFixture[str], content: bytes, message: str, hint: str
) -> None:
    Path("mine.toml").write_bytes(content)
    lines = refused(capsys, "train", "--config", "mine.toml")
    assert lines[0].startswith(f"error: {message}")
    assert hint in lines[-1]
    assert len(lines) <= 2


def test_a_folder_in_place_of_the_file_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").mkdir()
    assert refused(capsys, "train", "--config", "mine.toml")[0] == "error: cannot read mine.toml: Is a directory."


def test_the_file_is_not_named_for_a_mistake_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text("lr = 0.1\n")
    assert refused(capsys, "train", "--config", "mine.toml", "--batch", "0")[0] == "error: --batch is 0."


def test_a_file_may_have_a_byte_order_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = RecordedTrain(monkeypatch)
    Path("mine.toml").write_text("lr = 0.5\n", encoding="utf-8-sig")
    assert run(["train", "--config", "mine.toml"]) == 0
    assert trained.config == RunConfig(lr=0.5)


def test_the_doctor_accepts_all_settings_of_a_run_and_lists_those_that_it_uses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[RunConfig, LaunchConfig]] = []

    def doctor(config: RunConfig, launch: LaunchConfig, *_: object) -> None:
        calls.append((config, launch))

    monkeypatch.setattr("paceline.experiments.doctor.doctor", doctor)
    Path("mine.toml").write_text('workload = "vgg11"\nlr = 0.5\nepochs = 3\nranks = 3\n')
    assert run(["doctor", "--config", "mine.toml", "--batch", "64"]) == 0
    assert calls == [(RunConfig(workload="vgg11", lr=0.5, epochs=3, batch=64), LaunchConfig(ranks=3))]
    assert run(["doctor", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--batch-per-rank" in text
    assert "--epochs" not in text


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def train(*_: object) -> None:
        raise error

    monkeypatch.setattr("paceline.experiments.train.train", train)


@pytest.mark.parametrize("kind", ERRORS_BY_NAME.values())
def test_every_kind_of_error_has_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: type[PacelineError]
) -> None:
    failing(monkeypatch, kind("it [bold]broke[/bold].", hint="fix [it]", detail="Traceback:\n  [1] line"))
    assert run(["train"]) == kind.exit_code
    assert capsys.readouterr().err == "Traceback:\n  [1] line\nerror: it [bold]broke[/bold].\nhint: fix [it]\n"


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "1", "LOCAL_RANK": "1"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("launcher", "first"),
    [
        (TORCHRUN, {"LOCAL_RANK": "0", "RANK": "2"}),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {}),
        (SRUN, {"SLURM_LOCALID": "0", "SLURM_PROCID": "2"}),
        (SRUN, {"SLURM_NTASKS": "8"}),
        (SRUN | TORCHRUN, {"LOCAL_RANK": "0"}),
    ],
    ids=["torchrun", "ranks without a host", "srun", "process started by a task", "torchrun in srun"],
)
def test_a_usage_error_is_printed_by_the_first_process_of_a_host(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    launcher: dict[str, str],
    first: dict[str, str],
) -> None:
    monkeypatch.setattr(sys.modules["paceline.cli.main"], "EXIT_DELAY_S", 0.0)
    for environment, prints in ((launcher, not first), (launcher | first, True)):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for arguments in (["train", "nosuch"], ["train", "--nosuch"]):
            assert len(refused(capsys, *arguments)) == (2 if prints else 0)


def test_an_error_that_one_process_alone_may_have_is_always_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    failing(monkeypatch, LaunchError("cannot reach the master"))
    assert run(["train"]) == LaunchError.exit_code
    assert "cannot reach the master" in capsys.readouterr().err


def test_an_error_without_a_hint_prints_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, PacelineError("x" * 300))
    assert run(["train"]) == 1
    assert capsys.readouterr().err == f"error: {'x' * 300}\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interrupt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    failing(monkeypatch, error)
    assert run(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_an_interrupted_command_prints_its_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def interrupted(
        _: RunConfig,
        __: LaunchConfig,
        out: Path,
        watch: Callable[[Path], AbstractContextManager[object]],
        *_rest: object,
    ) -> None:
        with watch(out):
            raise KeyboardInterrupt

    monkeypatch.setattr(f"paceline.experiments.{command}.{command}", interrupted)
    assert run([command, "--out", "there"]) == 130
    assert capsys.readouterr().err == "interrupted; the record so far is in there\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError, match="bug"):
        run(["train"])


def test_main_exits_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "strategies", "dpd"])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as exited:
        main()
    assert signal.signal(signal.SIGINT, before) is signal.SIG_DFL  # No traceback on Ctrl-C during Python's exit.
    assert exited.value.code == 2


def test_an_interrupt_during_the_imports() -> None:
    hook = "class Broken:\n def find_spec(self, name, *_):\n  if name == 'paceline.cli.main': raise KeyboardInterrupt\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{hook}\nimport sys; sys.meta_path.insert(0, Broken()); import paceline.cli"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def paceline(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-m", "paceline", *arguments], capture_output=True, text=True, check=False
    )


def test_output_that_nobody_reads_ends_a_command_without_a_traceback() -> None:
    """`paceline strategies | head -1` closes the pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "strategies"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["doctor", "--help"],
        ["--version"],
        ["strategies", "ddp"],
        ["train", "--strategy", "dpd"],
    ],
    ids=" ".join,
)
def test_quick_commands_import_nothing_heavy(arguments: list[str]) -> None:
    done = paceline(*arguments, flags=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "paceline" in imported
    assert not imported & {"torch", "scipy", "plotly", "jinja2"}


def test_report_writes_traces_of_existing_records(capsys: pytest.CaptureFixture[str]) -> None:
    write_experiment(Path("experiment"), events=True)
    assert run(["report", "experiment", "--trace", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert sorted(result["traces"]) == sorted(map(str, Path("experiment").glob("repeat-*/*/trace.json")))
    assert len(result["traces"]) == 8
    assert run(["report", "experiment", "--trace"]) == 0
    assert "traces: 8 files trace.json in the runs' folders under experiment" in capsys.readouterr().out


def test_report_without_timelines_writes_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    write_experiment(Path("experiment"))
    assert run(["report", "experiment", "--trace", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["traces"] == []
    assert "the records contain no timelines to make a trace of." in captured.err
    assert run(["report", "experiment", "--trace"]) == 0
    captured = capsys.readouterr()
    assert "wrote experiment/report.html" in captured.out
    assert "the records contain no timelines to make a trace of." in captured.err


def test_an_error_of_a_trace_is_printed_after_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_experiment(Path("experiment"), events=True) / "repeat-1" / "4"
    (path / "trace.json").mkdir()
    assert run(["report", str(path), "--trace", "--json"]) == 8
    captured = capsys.readouterr()
    assert json.loads(captured.out)["report"] == str(path / "report.html")
    assert f"error: cannot write {path / 'trace.json'}: Is a directory.\nhint: " in captured.err

    summary = path / "summary.json"
    summary.unlink()
    monkeypatch.setattr("paceline.experiments.train.train", lambda *_: read_run(path))
    assert run(["train", "--trace"]) == 8
    captured = capsys.readouterr()
    assert f"record: {path}" in captured.out
    assert f"paceline report {path} --trace" in captured.err


def test_report_of_an_examination_prints_its_findings(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_experiment(Path("examined"), repeats=1)
    for file in ("experiment.json", "events.jsonl"):
        (path / file).unlink()
    (path / "repeat-1" / "4").rename(path / "workload")
    write_examination(path, examination(measured_s=7.0))
    assert run(["report", "examined"]) == 0
    captured = capsys.readouterr()
    assert "No problems found" in captured.out
    assert captured.out.count("ms per step") == 1, "only in the finding on the workload: no run is shown"
    assert not list(path.glob("*.html"))
    assert run(["report", "examined", "--json", "--trace"]) == 0
    captured = capsys.readouterr()
    content = json.loads(captured.out)
    assert (content["record"], content["problems"]) == ("examined/doctor.json", 0)
    assert content["examination"]["measured_s"] == 7.0
    assert "the folders contain examinations and no runs" in captured.err
    write_experiment(Path("experiment"), repeats=1)
    assert run(["report", "experiment", "examined"]) == 8
    assert "examined contains an examination by `paceline doctor` and no run to compare." in capsys.readouterr().err


def test_a_damaged_examination_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("doctor.json").write_text('{"schema": ' + "[" * 100_000)
    assert run(["report", "."]) == 8
    assert capsys.readouterr().err == "error: doctor.json cannot be read: it is nested too deeply.\n"


def test_doctor_with_a_file_as_its_folder_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("")
    assert run(["doctor", "--ranks", "2", "--out", "taken"]) == 8
    captured = capsys.readouterr()
    assert captured.err.endswith(
        "error: cannot write to taken: Not a directory.\nhint: name another folder with --out\n"
    )


def test_help_is_quick() -> None:
    """Check the least CPU time of several calls: other programs can only increase it, and the wall time even more."""
    best_wall_s = best_cpu_s = float("inf")
    for _ in range(10):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        assert paceline("--help").returncode == 0
        wall_s = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        best_wall_s, best_cpu_s = min(best_wall_s, wall_s), min(best_cpu_s, cpu_s)
        if max(best_wall_s, best_cpu_s) < HELP_LIMIT_S:
            break
    assert best_cpu_s < HELP_LIMIT_S
    assert best_wall_s < 10 * HELP_LIMIT_S, "it waits for something"


@pytest.mark.timing
def test_help_answers_within_its_limit() -> None:
    def check(_: int) -> None:
        start = time.perf_counter()
        assert paceline("--help").returncode == 0
        is_busy = os.getloadavg()[0] > usable_cores()  # Other programs have the cores: the time says nothing then.
        assert time.perf_counter() - start < HELP_LIMIT_S or is_busy

    eventually(check, tries=20)


def test_the_installed_command_is_paceline() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("paceline")), "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, importlib.metadata.version("paceline") + "\n")
