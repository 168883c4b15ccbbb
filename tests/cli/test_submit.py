"""`paceline submit`: the job script, errors that are found before the job is submitted, and the output."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import run

SHAPE = ("--hosts", "2", "--ranks-per-host", "4")


@pytest.fixture(autouse=True)
def _work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder whose name needs quoting in a shell, on a machine without Slurm."""
    folder = tmp_path / "it's $HOME 100%"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(programs(tmp_path)))


def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    return folder


def install(tmp_path: Path, name: str, text: str) -> None:
    """Replace a program of Slurm by a shell script."""
    file = programs(tmp_path) / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def script_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the job script that a dry run prints."""
    assert run(["submit", "--slurm", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert run(["submit", "--slurm", *arguments]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def options(script: str) -> list[str]:
    """Return the options of sbatch in a job script."""
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize(
    ("command", "goes_on"),
    [("train", "--resume auto "), ("train --resume latest", ""), ("train --resume here", ""), ("compare", "")],
)
def test_a_job_that_comes_back_goes_on(capsys: pytest.CaptureFixture[str], command: str, goes_on: str) -> None:
    grace = ["--checkpoint-every", "100", "--grace", "45.5"] if command.startswith("train") else []
    script = script_of(capsys, "--requeue", *SHAPE, "--", *command.split(), "--out", "here", *grace)
    assert {"--requeue", "--open-mode=append"} < set(options(script))
    assert f"--signal=USR1@{46 if grace else 30}" in options(script)
    name, _, rest = command.partition(" ")
    words = " ".join(filter(None, [name, goes_on.strip(), rest, "--out here", *grace]))
    assert script.splitlines()[-4].endswith(f" -m paceline {words} || code=$?")
    assert script.splitlines()[-2:] == [
        'if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$code"',
    ]


def test_a_job_that_would_come_back_to_the_same_checkpoint_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--", "train", "--resume", "runs/a/checkpoints/step-00000020", "--out", "runs/a")
    script_of(capsys, *SHAPE, *words)
    error = refused(capsys, "--requeue", *SHAPE, *words)
    assert "--requeue was given with --resume runs/a/checkpoints/step-00000020: each time that the job" in error


def test_the_script(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = ["--account", "us", "--partition", "gpu", "--gres", "gpu:4", "--time", "1:00:00", "--cpus-per-rank", "8"]
    passed_on = ["--qos=high", "--mem", "32G", "--exclusive", "--constraint", "fast"]
    assert script_of(capsys, *SHAPE, *named, *passed_on, "--", "compare", "vgg11", "--steps", "40") == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=paceline-compare\n"
        f"#SBATCH --output={tmp_path}/slurm-%j.out\n"
        "#SBATCH --no-requeue\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=4\n"
        "#SBATCH --cpus-per-task=8\n"
        "#SBATCH --account=us\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --gres=gpu:4\n"
        "#SBATCH --time=1:00:00\n"
        "#SBATCH --qos=high\n"
        "#SBATCH --mem 32G\n"
        "#SBATCH --exclusive\n"
        "#SBATCH --constraint fast\n"
        "set -euo pipefail\n"
        f"cd {tmp_path}\n"
        "# Tasks recognise each other by a token, which srun passes on in the environment.\n"
        f"PACELINE_TOKEN=$({sys.executable} -c 'import secrets; print(secrets.token_hex(32))')\n"
        "export PACELINE_TOKEN\n"
        f"srun --nodes=2 --ntasks-per-node=4 --cpus-per-task=8 {sys.executable} -m paceline compare "
        '--out "runs/slurm-${SLURM_JOB_ID}-vgg11-compare" vgg11 --steps 40\n'
    )


def test_names_and_short_options_of_sbatch_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    long = script_of(
        capsys, *SHAPE, "--account", "us", "--partition", "p", "--time", "5", "--cpus-per-rank", "2", "--", "train"
    )
    short = ["-N2", "--ntasks-per-node=4", "-A", "us", "-pp", "-t=5", "-c2", "--", "train"]
    assert script_of(capsys, *short) == long
    assert script_of(capsys, "-n", "8", "--nodes", "2", *short[2:]) == long


def test_arguments_are_quoted_for_the_shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Run the script with an srun that prints its arguments and its folder."""
    words = ["--tag", "it's", 'a "b"', "$HOME `id` $(id) \\ ; & * #", "é", ""]
    Path("train me.py").touch()
    script = script_of(capsys, *SHAPE, "--", "compare", "--script", "train me.py", "--steps", "20", "--", *words)
    install(
        tmp_path,
        "srun",
        f'exec {sys.executable} -c "import json, os, sys; '
        'print(json.dumps([os.environ[\'PACELINE_TOKEN\'], os.getcwd(), *sys.argv]))" "$@"',
    )
    environment = {"SLURM_JOB_ID": "7", "PATH": str(programs(tmp_path))}
    bash = shutil.which("bash", path="/usr/bin:/bin")
    assert bash is not None
    done = subprocess.run([bash], input=script, cwd="/", env=environment, capture_output=True, text=True, check=True)
    token, folder, _, *arguments = json.loads(done.stdout)
    assert folder == str(Path.cwd())
    assert len(token) == 64
    assert token not in script, "a new one each time that the job starts"
    start = [sys.executable, "-m", "paceline", "compare", "--out", "runs/slurm-7-cnn-compare"]
    assert arguments == [
        "--nodes=2",
        "--ntasks-per-node=4",
        *start,
        "--script",
        "train me.py",
        "--steps",
        "20",
        "--",
        *words,
    ]


def test_options_are_quoted_as_sbatch_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    """sbatch does not quote like a shell; `tests/launch/slurm` checks such a line with a real sbatch."""
    shown = options(script_of(capsys, "--comment", 'it\'s "b" \\ #1', "-Jname", "--mail-user=a@b", "--", "train"))
    assert shown[-3:] == ['--comment "it\'s \\"b\\" \\\\ #1"', "-Jname", "--mail-user=a@b"]
    # A % in the folder's name is not a replacement symbol of Slurm.
    assert f'"--output={Path.cwd()}%/slurm-%j.out"' in shown


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        (["--", "train"], (1, 2)),
        (["--", "train", "--strategy", "single"], (1, 1)),
        (["--", "train", "--ranks", "4"], (1, 4)),
        (["--", "train", "--hosts", "2", "--ranks", "4"], (2, 2)),
        (["--hosts", "2", "--", "train", "--ranks", "4"], (2, 2)),
        (["--hosts", "2", "--", "train", "--ranks-per-host", "3"], (2, 3)),
        (["--hosts", "2", "--", "train"], (2, 2)),
        (["--ranks", "6", "--ranks-per-host", "2", "--", "train"], (3, 2)),
        (["--ranks", "6", "--hosts", "2", "--", "train", "--ranks", "6"], (2, 3)),
        (["--", "scale", "--ranks", "1,2,4"], (1, 4)),
        (["--hosts", "2", "--", "scale", "--ranks", "1,4"], (2, 2)),
        (["--hosts", "2", "--ranks-per-host", "3", "--", "scale", "--ranks", "1,3"], (2, 3)),
        (["--hosts", "2", "--", "scale", "--ranks", "1,2", "--ranks-per-host", "1,2"], (2, 2)),
        (["--hosts", "4", "--ranks-per-host", "2", "--", "scale", "--ranks", "1,2"], (4, 2)),
        (["--gres", "gpu:4", "--", "train"], (1, 4)),
        (["--gres=license:9,gpu:a100:8(S:0-1)", "--hosts", "2", "--", "train"], (2, 8)),
        (["--gres", "gpu", "--", "train"], (1, 1)),
        (["--gres", "gpu:4", "--ranks-per-host", "2", "--", "train"], (1, 2)),
        (["--gpus-per-node=4", "--", "train"], (1, 4)),
        (["--gpus-per-node", "a100:2,v100:1", "--", "train"], (1, 3)),
        (["--gpus-per-node=8", "--gpus-per-task=2", "--", "train"], (1, 4)),
        (["--gpus-per-task=1", "--", "train"], (1, 2)),
        (["--hosts", "2", "--gpus", "8", "--", "train"], (2, 4)),
        (["--hosts", "2", "-G8", "--gres", "gpu:2", "--", "train"], (2, 2)),
        (["--gres-flags=enforce-binding", "--", "train"], (1, 2)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_task_per_rank(capsys: pytest.CaptureFixture[str], arguments: list[str], shape: tuple[int, int]) -> None:
    shown = options(script_of(capsys, *arguments))
    assert (f"--nodes={shape[0]}", f"--ntasks-per-node={shape[1]}") == tuple(o for o in shown if o.startswith("--n"))[
        -2:
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--", "trian"], "error: No such command 'trian'.", "--help"),
        (["--", "train", "--bacth", "3"], "error: No such option: --bacth", "--help"),
        (["--", "train", "--batch", "many"], "error: Invalid value for '--batch'", "--help"),
        (["--", "train", "cmn"], "error: there is no workload 'cmn'.", "did you mean 'cnn'?"),
        (["--", "train", "gone:make"], "error: there is no module 'gone' in", "run the command in the folder"),
        (["--", "train", "--data", "digts"], "error: there is no data set 'digts'.", "did you mean 'digits'?"),
        (["--", "train", "--strategy", "dpd"], "error: there is no strategy 'dpd'.", "did you mean 'ddp'?"),
        (["--", "compare", "--strategies", "ddp,dpd"], "error: there is no strategy 'dpd'.", "did you mean 'ddp'?"),
        (
            ["--", "compare", "--strategies", "ddp:bucket=1,p2p"],
            "error: there is no ddp option 'bucket'.",
            "did you mean 'bucket_mb'?",
        ),
        (["--", "compare", "--script", "gone.py"], "error: there is no script gone.py.", "file"),
        (["--", "train", "--lr", "-1"], "error: --lr is -1.0.", "0 or more"),
        (
            ["--", "report", "runs/x"],
            "error: `paceline report` starts no ranks.",
            "run it without submit; commands that can be submitted:",
        ),
        (["--", "submit", "--", "train"], "error: `paceline submit` starts no ranks.", "compare, train"),
        (["--"], "error: no command to submit was given.", "write it after `--`"),
        (["--qos=high"], "error: no command to submit was given.", "write it after `--`"),
        (["--mem", "3G", "stray", "--", "train"], "error: 'stray' is not an option of sbatch.", "after `--`"),
        (["--hosts", "0", "--", "train"], "error: Invalid value for '--hosts'", "--help"),
        (["--ranks", "3", "--hosts", "2", "--", "train"], "error: 3 ranks do not divide over 2 hosts.", "--ranks"),
        (
            [*SHAPE, "--", "train", "--ranks", "4"],
            "error: the job has 2 × 4 ranks, but the command sets 4 ranks.",
            "set it only once",
        ),
        (
            [*SHAPE, "--", "train", "--hosts", "3", "--ranks", "6"],
            "error: the job has 2 × 4 ranks, but the command sets 3 hosts.",
            "set it only once",
        ),
        (
            ["--hosts", "2", "--ranks-per-host", "1", "--", "scale", "--ranks", "1,4"],
            "error: the job has 2 × 1 ranks, but the command sets 4 ranks.",
            "set it only once",
        ),
        (
            ["--hosts", "2", "--", "scale", "--ranks", "1,2,3"],
            "error: 3 ranks cannot be put evenly on 2 hosts with 2 ranks each.",
            "give other --ranks",
        ),
        (["--", "scale", "--strategies", "ddp,dpd"], "error: there is no strategy 'dpd'.", "did you mean 'ddp'?"),
        (["--", "scale", "--mode", "week"], "error: --mode cannot be 'week'.", "did you mean 'weak'?"),
        (
            ["--", "train", "--hosts", "2", "--master", "n1:29500"],
            "error: --master n1:29500 was given in a command for Slurm.",
            "leave it out",
        ),
        (["--", "compare", "--emulate", "4"], "error: --emulate 4 was given in a command for Slurm.", "leave it out"),
        (["--comment", "a\nb", "--", "train"], "error: 'a\\nb' contains a line break.", "one line"),
        (["--", "train", "--out", "a\nb"], "error: 'a\\nb' contains a line break.", "one line"),
        (["--account", "a\n#SBATCH --uid=0", "--", "train"], "error: '--account=a\\n#SBATCH", "one line"),
        (["--script", "no/folder", "--", "train"], "error: cannot write no/folder: No such file", "--script"),
    ],
    ids=lambda value: " ".join(value).replace("\n", " ") if isinstance(value, list) else "",
)
def test_errors_are_found_before_the_job_is_submitted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], error: str, hint: str
) -> None:
    install(tmp_path, "sbatch", f"touch {tmp_path}/submitted; echo 7")
    lines = refused(capsys, *arguments).splitlines()
    assert lines[0].startswith(error)
    assert hint in lines[1]
    assert not (tmp_path / "submitted").exists()
    assert not list(Path.cwd().iterdir())


def test_the_name_of_the_program_may_be_typed_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert script_of(capsys, "--", "paceline", "train") == script_of(capsys, "--", "train")


def test_help_of_a_command_is_not_submitted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", "--", "train", "--help"]) == 0
    assert "--batch-per-rank" in capsys.readouterr().out
    assert run(["submit", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--hosts", "--ranks-per-host", "--account", "--partition", "--gres", "--time", "--cpus-per-rank"):
        assert option in shown


def test_the_output_after_submitting(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    install(tmp_path, "sbatch", f'echo "$@" > "{tmp_path}/given"; cat > "{tmp_path}/script"; echo "41;somewhere"')
    (programs(tmp_path) / "cat").symlink_to(shutil.which("cat", path="/usr/bin:/bin") or "")
    assert run(["submit", *SHAPE, "--", "compare"]) == 0
    captured = capsys.readouterr()
    script = (tmp_path / "script").read_text()
    assert (tmp_path / "given").read_text() == "--parsable\n"
    assert captured.out == (
        f"{script}\n"
        "job 41: 2 hosts × 4 ranks\n"
        "  state:    squeue --job=41\n"
        f"  log:      tail -F '{quoted(Path.cwd() / 'slurm-41.out')}'\n"
        "  cancel:   scancel 41\n"
        f"  records:  {Path.cwd()}/runs/slurm-41-cnn-compare\n"
    )
    assert captured.err == ""


def quoted(path: Path) -> str:
    return str(path).replace("'", "'\"'\"'")


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    install(tmp_path, "sbatch", 'echo 41; [ "$2" = keep.sh ]')
    arguments = ["--json", "--output", "log-%j", "--script", "keep.sh", "--", "train", "--out", "there"]
    assert run(["submit", *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "job": 41,
        "script": Path("keep.sh").read_text(),
        "log": str(Path("log-41").resolve()),
        "records": str(Path("there").resolve()),
    }
    assert "#SBATCH --output=log-%j\n" in printed["script"]
    assert printed["script"].endswith("-m paceline train --out there\n")
    assert run(["submit", "--dry-run", *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == printed | {"job": None, "log": str(Path("log-%j").resolve())}


@pytest.mark.parametrize(
    ("options", "log"),
    [
        (["--output", "%x-%j.txt"], "paceline-train-41.txt"),
        (["--output", "%x-%A.txt", "-Jmine"], "mine-41.txt"),
        (["-o", "/logs/%u/%4j%%.txt", "--job-name", "mine"], "/logs/me/0041%.txt"),
        (["--output", "log", "--chdir=there"], "there/log"),
        (["--output", "%x-%N"], "paceline-train-%N"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_replacement_symbols_of_slurm_in_the_log_file_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], log: str
) -> None:
    monkeypatch.setenv("LOGNAME", "me")
    install(tmp_path, "sbatch", "echo 41")
    assert run(["submit", "--json", *options, "--", "train"]) == 0
    assert json.loads(capsys.readouterr().out)["log"] == str(Path.cwd() / log)


def test_the_log_file_that_slurm_reports_takes_precedence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    install(tmp_path, "sbatch", "echo 41")
    install(tmp_path, "scontrol", '[ "$*" = "show job 41" ] && echo "   StdErr=/gone\n   StdOut=/a b/%j on n7.out"')
    assert run(["submit", "--json", "--output", "%j on %N.out", "--", "train"]) == 0
    assert json.loads(capsys.readouterr().out)["log"] == "/a b/41 on n7.out"


def test_replacement_symbols_of_slurm_are_not_replaced_in_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install(tmp_path, "sbatch", "echo 41")
    assert run(["submit", "--json", "--", "train", "--out", "sub-%j"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["script"].endswith("-m paceline train --out sub-%j\n")
    assert printed["records"] == str(Path.cwd() / "sub-%j")


def test_without_sbatch(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "--", "train", code=5)
    assert error.startswith("error: sbatch was not found on this machine.\nhint: ")
    assert "login node" in error
    assert "--dry-run" in error


def test_an_error_of_sbatch_is_printed_unchanged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    install(tmp_path, "sbatch", "echo 'sbatch: error: [your] account has expired' >&2; exit 1")
    assert refused(capsys, "--", "train", code=5).startswith(
        "sbatch: error: [your] account has expired\nerror: sbatch rejected the job.\n"
    )


def test_the_newest_checkpoint_of_a_new_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "--dry-run", "--", "train", "--resume", "latest")
    assert "--resume latest was given without --out: the job would write to a new folder, which has no check" in error
    assert "--out runs/a" in script_of(capsys, "--", "train", "--resume", "latest", "--out", "runs/a")


def test_a_setting_without_effect_is_refused_unless_the_checkpoint_may_have_what_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = refused(capsys, "--dry-run", "--", "train", "--keep", "3")
    assert "--keep has no effect without --checkpoint-every." in error
    script_of(capsys, "--", "train", "--resume", "latest", "--out", "runs/a", "--keep", "3")
