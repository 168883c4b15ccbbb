"""Continuing an experiment: the commands that may, and the record afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from experiments_on_disk import CLASSIC, write_experiment
from paceline.errors import RecordError
from paceline.records import EventWriter
from paceline.records.events import (
    EXPERIMENT_EVENTS,
    ContinuedEvent,
    EndEvent,
    FailureEvent,
    InterruptedEvent,
    ParityEvent,
    ScheduledEvent,
    read_events,
)
from paceline.records.experiment.continuation import continued_design
from paceline.records.experiment.design import Candidate, CompareDescription, ScaleDescription
from paceline.records.experiment.folder import ExperimentFolder
from paceline.records.experiment.record import read_experiment
from paceline.records.reader import is_complete
from paceline.records.writer import encode
from run_models import PROVENANCE, compare_design, recorded_settings, scale_design

SETTINGS = {key: value for key, value in recorded_settings(steps=12).items() if key != "strategy"}
DESIGN = compare_design(repeats=2, max_repeats=2)


def description(**changes: Any) -> CompareDescription:
    """Return the description that `write_experiment` writes."""
    made = CompareDescription(
        kind="compare", candidates=list(CLASSIC), config=SETTINGS, design=DESIGN, provenance=PROVENANCE
    )
    return replace(made, **changes)


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """Folder of an experiment of 4 candidates and 2 repeats that was interrupted; its last run is incomplete."""
    path = write_experiment(tmp_path / "my out", interrupted=True)
    (path / "repeat-2" / "4" / "finished").unlink()
    return path


def refusal(path: Path, new: CompareDescription | ScaleDescription) -> RecordError:
    """Return the error of a command that may not continue an experiment; the folder must stay as it was."""
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(RecordError) as caught:
        ExperimentFolder.create(path, new)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    return caught.value


def test_the_same_command_continues(unfinished: Path) -> None:
    folder = ExperimentFolder.create(unfinished, description())
    assert folder.earlier is not None
    assert len(folder.earlier.kept) == 7
    assert "repeat-2/4" not in folder.earlier.kept
    assert (folder.earlier.failed, folder.earlier.repeats, folder.earlier.parts) == ([], 2, 1)


def test_a_damaged_run_is_measured_again(unfinished: Path) -> None:
    (unfinished / "repeat-1" / "2" / "summary.json").write_text("{")
    earlier = ExperimentFolder.create(unfinished, description()).earlier
    assert earlier is not None
    assert len(earlier.kept) == 6
    assert "repeat-1/2" not in earlier.kept


def test_an_experiment_with_a_damaged_event_does_not_go_on(unfinished: Path) -> None:
    file = unfinished / "events.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], lines[2][:-9] + "\n", *lines[3:]]))
    error = refusal(unfinished, description())
    assert error.message == f"{file} is damaged: line 3: it is not valid JSON: it is cut short."
    assert f"`paceline report {unfinished}` shows what can be read" in (error.hint or "")


def test_a_new_folder_has_nothing_from_before(tmp_path: Path) -> None:
    assert ExperimentFolder.create(tmp_path / "new", description()).earlier is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": SETTINGS | {"lr": 0.5, "batch": 64}}, "--batch not set (now 64); --lr not set (now 0.5)."),
        ({"config": SETTINGS | {"augment": False}}, "other settings: --augment on (now off)."),
        ({"config": SETTINGS | {"workload": "vgg11", "seed": 3}}, "WORKLOAD cnn (now vgg11); --seed 0 (now 3)."),
        ({"config": SETTINGS | {"steps": None}}, "--steps 12 (now not set)."),
        ({"design": replace(DESIGN, ranks=4, ranks_per_host=4)}, "--ranks 2 (now 4); --ranks-per-host 2 (now 4)."),
        ({"design": replace(DESIGN, emulated="2@1gbit")}, "--emulate not set (now 2@1gbit)."),
        ({"design": replace(DESIGN, proof=False)}, "--proof on (now off)."),
        ({"design": replace(DESIGN, repeats=1)}, "--repeats 2 (now 1; it can only be raised)."),
        ({"candidates": list(CLASSIC[1:])}, "other settings: now without single."),
        ({"candidates": [*CLASSIC, Candidate("p2p", "p2p")]}, "other settings: now with p2p."),
        ({"candidates": list(reversed(CLASSIC))}, "other candidates of the same names, or in another order."),
    ],
)
def test_other_settings_are_named(unfinished: Path, changes: dict[str, Any], said: str) -> None:
    error = refusal(unfinished, description(**changes))
    assert error.message.startswith(f"{unfinished} already contains a record with other settings: ")
    assert error.message.endswith(said)
    original = f"paceline compare --ranks 2 --out '{unfinished}'"
    assert error.hint == f"name another folder with --out, or go on with the original command: `{original}`"


@pytest.mark.parametrize(
    "changes",
    [
        {"config": SETTINGS | {"trace": True, "timeout": 7.0, "data_dir": "there", "tensorboard": True}},
        {"design": replace(DESIGN, requested_threads=1)},
        {"provenance": replace(PROVENANCE, host="renamed", commit="f00", system="Linux 7", memory_bytes=1)},
        {"provenance": replace(PROVENANCE, sources="abc")},
    ],
)
def test_changes_that_affect_no_measurement_are_accepted(unfinished: Path, changes: dict[str, Any]) -> None:
    assert ExperimentFolder.create(unfinished, description(**changes)).earlier is not None
    assert read_experiment(unfinished).config == SETTINGS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cpu": "another processor"}, "measured with the processor a processor (now another processor)."),
        ({"cpu_count": 64}, "measured with cores 2 (now 64)."),
        ({"versions": {"paceline": "0.1.0", "torch": "2.14.0"}}, "measured with torch 2.13.0 (now 2.14.0)."),
        ({"versions": {"paceline": "0.2.0", "torch": "2.13.0"}}, "measured with paceline 0.1.0 (now 0.2.0)."),
        ({"python": "3.12.1"}, "measured with Python 3.11.0 (now 3.12.1)."),
    ],
)
def test_another_machine_or_version_is_refused(unfinished: Path, changes: dict[str, Any], said: str) -> None:
    error = refusal(unfinished, description(provenance=replace(PROVENANCE, **changes)))
    assert error.message.endswith(said)
    assert error.hint is not None
    assert "name another folder with --out" in error.hint


def test_other_sources_of_paceline_are_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", interrupted=True, provenance={"sources": "abc"})
    error = refusal(path, description(provenance=replace(PROVENANCE, sources="def")))
    assert error.message.endswith("measured with Paceline's sources abc (now def).")


def test_another_kind_of_experiment_is_refused(unfinished: Path) -> None:
    other = ScaleDescription(
        kind="scale", candidates=list(CLASSIC), config=SETTINGS, design=scale_design(), provenance=PROVENANCE
    )
    assert "an experiment of `paceline compare`" in refusal(unfinished, other).message


def test_a_finished_experiment_is_refused_and_names_what_failed(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", failures={"allreduce": "rank 1 failed."})
    error = refusal(path, description())
    assert error.message == f"{path} contains this experiment already; it is finished, with 6 runs."
    assert error.hint is not None
    assert error.hint.startswith(
        f"`paceline report {path}` shows it; larger --repeats and --max-repeats measure more, and try allre"
    )


@pytest.mark.parametrize("repeats", [(3, 2), (2, 5)])
def test_a_finished_experiment_continues_with_more_repeats(tmp_path: Path, repeats: tuple[int, int]) -> None:
    path = write_experiment(tmp_path / "e", failures={"allreduce": "rank 1 failed."})
    least, most = repeats
    design = replace(DESIGN, repeats=least, max_repeats=most, interim_analyses=max(1, most - least + 1))
    earlier = ExperimentFolder.create(path, description(design=design)).earlier
    assert earlier is not None
    assert earlier.failed == ["allreduce"]
    assert (read_experiment(path).design.repeats, read_experiment(path).design.max_repeats) == repeats


@pytest.fixture
def diverged(tmp_path: Path) -> Path:
    """Folder of a finished experiment in which ddp stopped in repeat 2, since its loss was not finite."""
    path = write_experiment(tmp_path / "e")
    run = path / "repeat-2" / "4"
    (run / "finished").unlink()
    summary = json.loads((run / "summary.json").read_text())
    summary["divergence"] = {"step": 11, "loss": None, "before": 2.0}
    (run / "summary.json").write_text(json.dumps(summary))
    failure = FailureEvent(candidate="ddp", stage="repeat 2", kind="DivergenceError", message="it did.", hint=None)
    with (path / "events.jsonl").open("ab") as file:
        file.write(encode(failure) + b"\n")
    return path


MORE = description(design=replace(DESIGN, repeats=3, max_repeats=3))


def test_a_diverged_run_is_kept_and_its_candidate_not_tried_again(diverged: Path) -> None:
    assert "try" not in (refusal(diverged, description()).hint or "")
    earlier = ExperimentFolder.create(diverged, MORE).earlier
    assert earlier is not None
    assert (len(earlier.kept), earlier.failed) == (8, [])
    assert [(event.candidate, event.message) for event in earlier.diverged] == [("ddp", "it did.")]


def test_a_run_that_has_diverged_and_not_ended_is_tried_again(diverged: Path) -> None:
    """A loss that has grown does not stop a run, so one without its end was cut off."""
    file = diverged / "repeat-2" / "4" / "summary.json"
    summary = json.loads(file.read_text())
    summary["divergence"]["loss"] = 100.0
    file.write_text(json.dumps(summary))
    earlier = ExperimentFolder.create(diverged, MORE).earlier
    assert earlier is not None
    assert (len(earlier.kept), earlier.failed, earlier.diverged) == (7, ["ddp"], [])


def test_a_candidate_that_diverged_is_tried_again_if_its_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_scheme.py").write_text("# first version")
    own = [Candidate("mine", "own_scheme:Mine"), Candidate("ddp", "ddp")]
    path = write_experiment(tmp_path / "e", own, repeats=1)
    run = path / "repeat-1" / "1"
    (run / "finished").unlink()
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"divergence": {"step": 2, "loss": None, "before": 1.0}}))
    failure = FailureEvent(candidate="mine", stage="repeat 1", kind="DivergenceError", message="it did.", hint=None)
    with (path / "events.jsonl").open("ab") as file:
        file.write(encode(failure) + b"\n")
    (tmp_path / "own_scheme.py").write_text("# second version, which is longer")
    design = compare_design(repeats=2, max_repeats=2)
    earlier = ExperimentFolder.create(path, description(candidates=own, design=design)).earlier
    assert earlier is not None
    assert (list(earlier.kept), earlier.failed, earlier.diverged) == (["repeat-1/2"], ["mine"], [])


@pytest.mark.parametrize(
    ("old", "new", "looks"),
    [
        ((3, 10, 8), (3, 10, 8), 8),
        ((3, 10, 8), (3, 20, 18), 18),
        ((3, 3, 1), (5, 5, 1), 2),
        ((3, 10, 8), (8, 10, 3), 11),
        ((8, 10, 11), (8, 20, 13), 21),
    ],
    ids=["same", "more at most", "once more", "a later first look", "continued twice"],
)
def test_all_looks_for_a_winner_share_the_error_rate(
    old: tuple[int, int, int], new: tuple[int, int, int], looks: int
) -> None:
    before, now = (replace(DESIGN, repeats=a, max_repeats=b, interim_analyses=c) for a, b, c in (old, new))
    assert continued_design(before, now).interim_analyses == looks


def test_user_code_that_changed_is_refused_unless_none_of_its_runs_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("own_model", "own_scheme"):
        Path(f"{name}.py").write_text("one = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    candidates = [Candidate("ddp", "ddp"), Candidate("mine", "own_scheme:Mine:x=1")]
    failed = {"mine": "rank 1 failed."}
    settings = {"workload": "own_model:make"}
    path = write_experiment(tmp_path / "e", candidates, interrupted=True, failures=failed, settings=settings)
    new = description(candidates=candidates, config=SETTINGS | settings, design=replace(DESIGN, reference="mine"))
    Path("own_scheme.py").write_text("two = 2")
    folder = ExperimentFolder.create(path, new)
    assert folder.earlier is not None
    assert folder.earlier.reproved == {"mine"}
    folder.close()
    Path("own_model.py").write_text("two = 2")
    error = refusal(path, new)
    assert error.message == "own_model has changed since ddp was measured."
    assert "restore the earlier version" in str(error.hint)


def test_a_recipe_file_that_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("lr = 0.1")
    settings = {"recipe": "mine.toml"}
    path = write_experiment(tmp_path / "e", [Candidate("ddp", "ddp")], interrupted=True, settings=settings)
    new = description(
        candidates=[Candidate("ddp", "ddp")], config=SETTINGS | settings, design=replace(DESIGN, reference="ddp")
    )
    ExperimentFolder.create(path, new).close()
    Path("mine.toml").write_text("lr = 0.2")
    assert refusal(path, new).message == "mine.toml has changed since ddp was measured."


def test_only_one_process_may_write(unfinished: Path) -> None:
    folder = ExperimentFolder.create(unfinished, description())
    with pytest.raises(RecordError, match="another process is measuring in"):
        ExperimentFolder.create(unfinished, description())
    folder.close()
    ExperimentFolder.create(unfinished, description())


def test_a_folder_with_a_run_is_left_alone(tmp_path: Path) -> None:
    write_experiment(tmp_path / "e")
    run = tmp_path / "e" / "repeat-1" / "1"
    assert "already contains a record." in refusal(run, description()).message


def test_what_is_set_aside_leaves_an_empty_place(unfinished: Path) -> None:
    folder = ExperimentFolder.create(unfinished, description())
    cut = unfinished / "repeat-2" / "4"
    files = sorted(path.name for path in cut.iterdir())
    folder.set_aside(cut)
    folder.set_aside(cut)
    assert not cut.exists()
    assert sorted(path.name for path in (unfinished / "incomplete-1" / "repeat-2" / "4").iterdir()) == files


def test_events_that_a_continuation_made_obsolete_are_left_out(unfinished: Path) -> None:
    folder = ExperimentFolder.create(unfinished, description())
    with (unfinished / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"failure","cand')  # The process was killed.
    assert folder.earlier is not None
    writer = EventWriter(folder, continued_s=100.0)
    failure = FailureEvent(candidate="ddp", stage="repeat 1", kind="RankError", message="no", hint=None)
    writer.write(failure)
    writer.write(replace(failure, candidate="none"))
    writer.write(ContinuedEvent(provenance=PROVENANCE, kept=sorted(folder.earlier.kept), retried=["ddp"]))
    writer.write(ParityEvent("ddp", 2, 0.5, 1.0, 1e-5, True, 3, candidate="ddp"))
    writer.close()
    everything = read_events(unfinished / "events.jsonl", EXPERIMENT_EVENTS)
    assert [type(event) for event in everything].count(InterruptedEvent) == 1
    experiment = read_experiment(unfinished)
    assert not experiment.finished
    assert experiment.events_of(InterruptedEvent) == experiment.events_of(EndEvent) == []
    assert [event.candidate for event in experiment.events_of(FailureEvent)] == ["none"]
    assert [event.error for event in experiment.events_of(ParityEvent) if event.candidate == "ddp"] == [0.5]
    assert len(experiment.events_of(ScheduledEvent)) == 8
    assert experiment.events[-1].time_s >= 100.0
    assert [one.part for one in experiment.runs] == [0] * 7 + [1]


@pytest.mark.parametrize("missing", ["finished", "summary.json", "rank-1.csv", "timeline-1.bin", "run.json"])
def test_a_run_without_all_files_is_incomplete(tmp_path: Path, missing: str) -> None:
    run = write_experiment(tmp_path / "e", events=True) / "repeat-1" / "4"
    assert is_complete(run)
    (run / missing).unlink()
    assert not is_complete(run)


def test_a_run_with_truncated_files_is_incomplete(tmp_path: Path) -> None:
    run = write_experiment(tmp_path / "e") / "repeat-1" / "4"
    steps = run / "rank-1.csv"
    whole = steps.read_text()
    steps.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert not is_complete(run)
    steps.write_text(whole)
    assert is_complete(run)
    (run / "run.json").write_text("")
    assert not is_complete(run)
