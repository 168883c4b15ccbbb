"""Tests of checkpoints and `--resume` of `paceline train`, in real runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from commands import paceline
from paceline.analysis.steps.timing import losses_of
from paceline.config import RunConfig
from paceline.errors import CheckpointError
from paceline.experiments.resume import prepare_resume
from paceline.records import RunRecord, read_run
from paceline.records.events import CheckpointEvent, EvaluationEvent, LogEvent, ResumedEvent
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from paceline.training.checkpoints.storage.load import load
from training.checkpoints.storage.states import GROUPS, info, state

pytestmark = pytest.mark.takes(25)

STEPS, EVERY, RESUMED = 24, 5, 10
RUN = ("cnn", "--data", "synthetic:size=192", "--batch", "24", "--deterministic", "--recipe", "classic")
"""An epoch has 8 steps."""


def train(*arguments: str | Path, expect: int = 0) -> str:
    done = paceline("train", *map(str, arguments), expect=expect)
    return done.stdout + done.stderr


def weights(file: Path) -> dict[str, torch.Tensor]:
    return load_file(file)


def same(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


def without_later_ones(run: Path, copy: Path, step: int) -> Path:
    """Copy a run, as if it had been killed after a step, before the next checkpoint."""
    shutil.copytree(run, copy)
    for folder in (copy / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (copy / "finished").unlink()
    return copy


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on 3 ranks that was not disturbed, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    out, file = folder / "run", folder / "weights.safetensors"
    how = ("--checkpoint-every", EVERY, "--keep", 99, "--eval-every", 6, "--save", file, "--out", out)
    train(*RUN, "--ranks", "3", "--steps", str(STEPS), *map(str, how))
    return folder


def test_checkpoints_change_nothing(whole: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    train(*RUN, "--ranks", "3", "--steps", str(STEPS), "--no-evaluate", "--save", file, "--out", tmp_path / "run")
    assert same(whole / "weights.safetensors", file)


def test_one_is_written_at_every_interval_at_the_best_result_and_at_the_end(whole: Path) -> None:
    record = read_run(whole / "run")
    best = {event.step for event in record.events_of(CheckpointEvent) if event.is_best}
    steps = CheckpointFolder(whole / "run" / "checkpoints").steps()
    assert set(steps) == {5, 10, 15, 20, 24} | best
    assert record.summary is not None
    assert record.summary.best is not None
    assert record.summary.best.step in best
    assert CheckpointFolder(whole / "run" / "checkpoints").best() == record.summary.best.step
    assert all(event.error is None and event.bytes > 4e5 for event in record.events_of(CheckpointEvent))


def test_a_checkpoint_has_the_position_and_the_settings(whole: Path) -> None:
    info = load(whole / "run" / "checkpoints" / f"step-{RESUMED:08d}").info
    assert (info.step, info.epoch, info.epoch_samples, info.samples) == (10, 1, 2 * 24, 10 * 24)
    assert (info.strategy, info.ranks, info.config["lr"], info.config["steps"]) == ("ddp", 3, None, STEPS)
    assert info.config["schedule"] is None, "values of the recipe are not settings of the user"


def resume(out: Path, *arguments: str | Path) -> tuple[RunRecord, str]:
    said = train("--resume", "--out", out, *arguments)
    return read_run(out), said


@pytest.fixture(scope="module")
def resumed(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord, str]:
    folder = tmp_path_factory.mktemp("resumed")
    out = without_later_ones(whole / "run", folder / "run", RESUMED)
    record, said = resume(out, "--save", folder / "weights.safetensors")
    return folder, record, said


def test_the_weights_are_those_of_a_run_that_never_stopped(whole: Path, resumed: tuple[Path, RunRecord, str]) -> None:
    """Bit for bit, also with the buckets that DDP rebuilds after its first step."""
    assert same(whole / "weights.safetensors", resumed[0] / "weights.safetensors")


def test_one_record_spans_the_whole_run(whole: Path, resumed: tuple[Path, RunRecord, str]) -> None:
    folder, record, said = resumed
    before = read_run(whole / "run")
    assert losses_of(record) == losses_of(before)
    assert [log.step for log in record.events_of(LogEvent)][-1] == STEPS
    times = [event.time_s for event in record.events]
    assert times == sorted(times)
    assert [e.step for e in record.events_of(EvaluationEvent)] == [e.step for e in before.events_of(EvaluationEvent)]
    (event,) = record.events_of(ResumedEvent)
    assert (event.step, event.redone, event.lost, event.warnings) == (RESUMED, STEPS - RESUMED, [], [])
    assert not event.is_restart
    assert "resumed at step 10, 14 steps done again" in said
    assert "the run resumed 1 time; the tables above are of the steps since step 10" in said
    assert record.first_step == RESUMED
    assert {rank: len(steps) for rank, steps in record.steps.items()} == dict.fromkeys(range(3), STEPS - RESUMED)
    assert record.steps[0]["step"].tolist() == list(range(RESUMED, STEPS))
    assert len(read_run(folder / "run" / "attempt-1").steps[0]) == STEPS
    assert record.finished
    assert record.summary is not None
    assert before.summary is not None
    assert record.summary.steps == STEPS
    assert record.summary.average_loss == pytest.approx(before.summary.average_loss, rel=1e-6)
    assert record.summary.train_accuracy == pytest.approx(before.summary.train_accuracy, rel=1e-6)
    assert record.summary.best == before.summary.best
    assert record.summary.test == before.summary.test


def test_the_report_of_a_run_that_resumed(resumed: tuple[Path, RunRecord, str], tmp_path: Path) -> None:
    done = paceline("report", str(resumed[0] / "run"), "--out", str(tmp_path / "page.html"), "--json")
    assert json.loads(done.stdout)
    page = (tmp_path / "page.html").read_text()
    assert "Checkpoints" in page
    assert "ddp resumed 1 time, last at step 10, 14 steps done again" in page


def test_other_ranks_another_strategy_and_more_steps(whole: Path, tmp_path: Path) -> None:
    """The position is a number of samples, and settings given on the command line override those of the checkpoint."""
    out = without_later_ones(whole / "run", tmp_path / "run", RESUMED)
    given = ("--ranks", "2", "--strategy", "allreduce", "--steps", str(STEPS + 4), "--save", tmp_path / "w.safetensors")
    record, said = resume(out, *given)
    assert "on 2 ranks instead of 3, same global batch, under allreduce instead of ddp" in said
    assert f"  --steps: {STEPS + 4} (was {STEPS})" in said
    assert "  --strategy: allreduce (was ddp)" in said
    assert "--ranks" not in said
    before = losses_of(read_run(whole / "run"))
    assert losses_of(record)[:STEPS] == pytest.approx(before, rel=1e-4)
    assert record.summary is not None
    assert record.summary.steps == STEPS + 4
    assert record.config["strategy"] == "allreduce"


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(whole: Path, tmp_path: Path) -> None:
    out = without_later_ones(whole / "run", tmp_path / "run", 2 * EVERY)
    file = out / "checkpoints" / "step-00000010" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    newest = CheckpointFolder(out / "checkpoints").steps()[-2]
    record, said = resume(out)
    assert "step-00000010 is not usable: " in said
    assert record.events_of(ResumedEvent)[0].step == newest
    assert losses_of(record) == losses_of(read_run(whole / "run"))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(whole: Path, tmp_path: Path) -> None:
    out = without_later_ones(whole / "run", tmp_path / "run", EVERY)
    for file in out.glob("checkpoints/*/model.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    said = train("--resume", "--out", out, expect=12)
    assert f"{out / 'checkpoints'} has no checkpoint that can be loaded." in said
    assert "hint: restore the checkpoints from a copy, or begin again in another folder" in said


def test_a_finished_run_trains_more_epochs(tmp_path: Path) -> None:
    """From a checkpoint at the end of an epoch, in another folder, by a schedule that then has another end."""
    how = ("--schedule", "cosine", "--ranks", "2", "--checkpoint-every", "epoch", "--no-evaluate")
    train(*RUN, "--epochs", "1", *how, "--out", tmp_path / "one")
    said = train("--resume", tmp_path / "one", "--out", tmp_path / "two", "--epochs", "2")
    record = read_run(tmp_path / "two")
    assert [log.step for log in record.events_of(LogEvent)] == [13, 16]
    assert {log.epoch for log in record.events_of(LogEvent)} == {1}
    assert "  --epochs: 2 (was 1)" in said
    assert read_run(tmp_path / "one").finished, "the first run is as it was"
    assert CheckpointFolder(tmp_path / "two" / "checkpoints").steps() == [16]
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    said = train("--resume", "--out", tmp_path / "one")
    assert "one has trained all of its 8 steps; give more --epochs or --steps to go on" in said
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == files, "nothing is touched"


def test_an_asynchronous_run_goes_on_at_its_samples(tmp_path: Path) -> None:
    """No sample is trained twice within an epoch, and none is left out."""
    run = ("--strategy", "parameter_server:asynchronous=true", "--ranks", "2", "--no-evaluate", "--bn", "local")
    out = tmp_path / "run"
    train(*RUN, *run, "--steps", "120", "--checkpoint-every", "100", "--keep", "9", "--out", out)
    (first, *_) = CheckpointFolder(out / "checkpoints").steps()
    info = load(out / "checkpoints" / f"step-{first:08d}").info
    assert info.epoch * 8 + info.epoch_samples // 24 == first
    without_later_ones(out, tmp_path / "again", first)
    train("--resume", "--out", tmp_path / "again")
    record = read_run(tmp_path / "again")
    assert record.summary is not None
    assert record.summary.steps == 120
    assert sum(log.samples for log in record.events_of(LogEvent)) == 120 * 24


def test_a_stream_of_batches_skips_those_that_are_trained(tmp_path: Path) -> None:
    how = ("user_workloads:uneven", "--ranks", "2", "--steps", "6", "--no-evaluate", "--checkpoint-every", "2")
    train(*how, "--keep", "9", "--out", tmp_path / "whole")
    out = without_later_ones(tmp_path / "whole", tmp_path / "again", 2)
    train("--resume", "--out", out)
    assert losses_of(read_run(out)) == pytest.approx(losses_of(read_run(tmp_path / "whole")), rel=1e-5)


@pytest.mark.parametrize("reaction", ["continue", "stop"])
def test_a_full_disk(tmp_path: Path, reaction: str) -> None:
    """A file in place of the folder cannot be written to, like a full disk."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "checkpoints").write_text("")
    how = ("--ranks", "2", "--steps", "12", "--checkpoint-every", "5", "--checkpoint", "sync", "--no-evaluate")
    said = train(*RUN, *how, "--on-checkpoint-error", reaction, "--out", out, expect=12 if reaction == "stop" else 0)
    record = read_run(out)
    assert record.summary is not None
    assert record.summary.steps == (5 if reaction == "stop" else 12)
    assert said.count("the checkpoint of step 5 could not be written to ") >= 1
    assert record.finished == (reaction == "continue")


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--resume", "--out", "nowhere"], "nowhere has no checkpoints to resume from.", 12),
        (["--resume", "missing"], "missing does not exist, so there is no checkpoint to load.", 12),
        (["--checkpoint", "sync"], "--checkpoint sync was given without --checkpoint-every.", 2),
        (["--checkpoint-every", "often"], "--checkpoint-every is 'often'.", 2),
        (["--save", "model.pt"], "--save is 'model.pt'.", 2),
    ],
)
def test_wrong_options(arguments: list[str], message: str, code: int) -> None:
    assert message in train(*arguments, expect=code)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return the folder of a run with a checkpoint and without `run.json`, as a resume that was killed leaves it."""
    saved = info(4, loop={"world_size": 3})
    CheckpointFolder(tmp_path / "runs" / "kept" / "checkpoints").write(state(), GROUPS, saved)
    return tmp_path / "runs" / "kept"


def test_the_launcher_reads_no_tensors(kept: Path) -> None:
    for file in kept.rglob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    resumed = prepare_resume(RunConfig(), str(kept), None, (), print)
    assert resumed is not None
    assert (resumed.config.batch, resumed.ranks) == (64, 3)


def test_another_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    saved = msgspec.structs.replace(info(4), config={"workload": "cnn"})
    CheckpointFolder(tmp_path / "checkpoints").write(state(), GROUPS, saved)
    with pytest.raises(CheckpointError) as raised:
        prepare_resume(RunConfig(workload="vgg11"), str(tmp_path), None, ("workload",), print)
    assert raised.value.message == "the checkpoint is of another model: cnn, not vgg11."
    for name in ("cnn", "my_module:make"):  # The model of a user's workload may be the same.
        assert prepare_resume(RunConfig(workload=name), str(tmp_path), None, ("workload",), print) is not None


def test_a_run_whose_resume_was_killed_goes_on_in_its_folder(kept: Path) -> None:
    for path in (kept, kept / "checkpoints", kept / "checkpoints" / "step-00000004"):
        resumed = prepare_resume(RunConfig(), str(path), None, (), print)
        assert resumed is not None
        assert resumed.out == kept


def test_resume_of_the_last_run(tmp_path: Path) -> None:
    """Without --out, that is the run under runs/ whose checkpoint is the newest."""
    paceline("train", *RUN, "--ranks", "1", "--steps", "4", "--checkpoint-every", "2", "--no-evaluate", cwd=tmp_path)
    done = paceline("train", "--resume", "--steps", "6", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["steps"] == 6
    assert found["checkpoints"]["written"] == 3
    assert [tmp_path / found["record"]] == list((tmp_path / "runs").iterdir())
    assert read_run(tmp_path / found["record"]).config["steps"] == 6


@pytest.mark.parametrize(("batch", "steps"), [(48, 10 + 3 + 4), (8, 10 + 18 + 24)])
def test_another_batch_trains_the_rest_of_the_same_epochs(tmp_path: Path, batch: int, steps: int) -> None:
    """After 10 steps of 24 samples, 144 of the second epoch and 192 of the third are left."""
    how = ("--ranks", "2", "--epochs", "3", "--no-evaluate", "--checkpoint-every", "10", "--keep", "9")
    train(*RUN, *how, "--out", tmp_path / "one")
    out = without_later_ones(tmp_path / "one", tmp_path / "two", 10)
    record, said = resume(out, "--batch", str(batch))
    assert f"  --batch: {batch} (was 24)" in said
    assert record.summary is not None
    assert record.summary.steps == steps
    assert sum(log.samples for log in record.events_of(LogEvent)) == 3 * 192


def rates(record: RunRecord) -> list[float]:
    return [rate for log in record.events_of(LogEvent) for rate in log.lrs or []]


def test_a_scheduler_of_the_workload_goes_on(tmp_path: Path) -> None:
    """With its state at the same length, and with all its steps again if the run has another one."""
    how = ("user_workloads:scheduled", "--ranks", "2", "--batch", "8", "--no-evaluate", "--checkpoint-every", "5")
    train(*how, "--steps", "20", "--keep", "9", "--out", tmp_path / "whole")
    expected = [0.1 * (1 - 0.5 * step / 20) for step in range(20)]
    assert rates(read_run(tmp_path / "whole")) == pytest.approx(expected)
    for step in (10, 15):  # Twice in the same record.
        without_later_ones(tmp_path / "whole", tmp_path / f"from-{step}", step)
        record, said = resume(tmp_path / f"from-{step}")
        assert "not resumed" not in said
        assert rates(record) == pytest.approx(expected)
        assert losses_of(record) == losses_of(read_run(tmp_path / "whole"))
    record, said = resume(tmp_path / "from-10", "--steps", "40")
    assert "not resumed: the state of the scheduler, which makes its steps again" in said
    assert rates(record)[20:] == pytest.approx([0.1 * (1 - 0.5 * step / 40) for step in range(20, 40)])


def test_a_state_that_cannot_be_kept_stops_the_run_soon(tmp_path: Path) -> None:
    how = ("--ranks", "2", "--batch", "8", "--steps", "40", "--checkpoint-every", "30", "--no-evaluate")
    said = train("user_workloads:keeps_a_set", *how, "--out", tmp_path, expect=12)
    assert "error: the state of the optimiser cannot be kept in a checkpoint: weight/seen is a set." in said
    record = read_run(tmp_path)
    assert record.summary is not None
    assert record.summary.steps == 5, "after the first window"


def test_a_restart_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    """Also with --deterministic: nothing that prepares a resume may change the weights."""
    how = ("--ranks", "2", "--steps", "6", "--no-evaluate", "--save")
    train(*RUN, *how, tmp_path / "a.safetensors", "--out", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "finished").unlink()
    train(*RUN, *how, tmp_path / "b.safetensors", "--resume", "auto", "--out", tmp_path / "b")
    assert same(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (event,) = read_run(tmp_path / "b").events_of(ResumedEvent)
    assert (event.step, event.redone, event.checkpoint) == (0, 6, "")
