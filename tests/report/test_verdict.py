"""The verdict says what the figures say, and no more."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from experiments_on_disk import CLASSIC, read_comparison, write_experiment
from paceline.records.experiment import Candidate
from paceline.report.verdict import next_command, sentences

STEP_S = {"single": 0.04, "none": 0.01, "allreduce": 0.03, "ddp": 0.02}


def verdict(path: Path, *candidates: Candidate, **written: Any) -> str:
    written = {"step_s": STEP_S, "repeats": 4} | written
    return " ".join(sentences(read_comparison(write_experiment(path / "e", candidates or CLASSIC, **written))))


def test_a_winner_is_named_with_its_margin(tmp_path: Path) -> None:
    text = verdict(tmp_path)
    assert "Pick ddp: 20." in text
    assert "1.51× as fast as allreduce, the next best (1.47–1.55), over 4 repeats." in text


def test_distributing_is_judged_against_one_process(tmp_path: Path) -> None:
    assert "ddp on 2 ranks is 4.0" in verdict(tmp_path)
    slow = STEP_S | {"single": 0.002}
    text = verdict(tmp_path / "slow", step_s=slow)
    assert text.startswith("Train in one process: 2.0")
    assert "5.0" in text
    assert "as fast as ddp on 2 ranks, 50% of whose step goes away when nothing is exchanged." in text
    assert "Of those that share the work, pick ddp: 20." in text
    comparison = read_comparison(tmp_path / "slow" / "e")
    assert comparison.pick == "single"
    assert "--strategy single" in (next_command(comparison) or "")


def test_without_a_baseline_the_bound_speaks(tmp_path: Path) -> None:
    candidates = [candidate for candidate in CLASSIC if candidate.role != "baseline"]
    most = "ddp: 50% of its step goes away when nothing is exchanged; that is all that a better strategy"
    assert most in verdict(tmp_path, *candidates)
    assert most in verdict(tmp_path / "events", *candidates, events=True), "exposed communication is not all of it"


def test_exposed_communication_alone_says_nothing_of_what_could_be_gained(tmp_path: Path) -> None:
    text = verdict(tmp_path, *CLASSIC[2:], events=True)
    assert "ddp: 19% of its step is exposed communication." in text
    assert "could still gain" not in text


@pytest.mark.parametrize(("events", "called"), [(True, True), (False, False)])
def test_only_what_was_seen_is_called_exposed(tmp_path: Path, events: bool, called: bool) -> None:
    assert ("exposed" in verdict(tmp_path, events=events)) == called


def test_equals_have_no_winner(tmp_path: Path) -> None:
    text = verdict(tmp_path, step_s=STEP_S | {"allreduce": 0.02})
    assert "Pick" not in text
    assert "equally fast" in text or "No clear winner" in text


def test_one_repeat_is_too_little(tmp_path: Path) -> None:
    text = verdict(tmp_path, repeats=1)
    assert "too little to call it the faster one" in text
    assert re.search(r"ddp on 2 ranks was \d\.\d+× as fast as one process in 1 repeat, which is too little", text)
    assert "cannot be told" not in text


def test_one_candidate_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    assert "there is nothing to compare it with" in verdict(tmp_path, Candidate("ddp", "ddp"))


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    text = verdict(tmp_path, repeats=0, interrupted=True)
    assert "Nothing that could be picked was measured." in text
    assert "interrupted" in text


def test_the_burden_of_rank_0_is_a_sentence(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", [Candidate("gather_scatter", "gather_scatter"), Candidate("ddp", "ddp")])
    for file in path.rglob("repeat-*/1/summary.json"):
        summary = json.loads(file.read_text())
        summary["traffic"] = {"sent_bytes": [300, 100], "received_bytes": [300, 100]}
        file.write_text(json.dumps(summary))
    text = " ".join(sentences(read_comparison(path)))
    assert "gather_scatter: rank 0 moves 3.0× the bytes of any other rank." in text


def test_accuracies_of_guessing_are_not_compared(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", accuracy=0.11)
    for file in path.rglob("run.json"):
        content = json.loads(file.read_text())
        content["topology"]["classes"] = 10
        file.write_text(json.dumps(content))
    assert "those of guessing (10%)" in " ".join(sentences(read_comparison(path)))


def test_an_accuracy_beyond_the_spread_is_said(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=4)
    for file in path.rglob("repeat-*/3/summary.json"):
        summary = json.loads(file.read_text())
        summary["test"]["accuracy"] -= 0.2
        file.write_text(json.dumps(summary))
    assert "allreduce: the test accuracy is 20.0 percentage points lower than that of ddp" in " ".join(
        sentences(read_comparison(path))
    )


def test_a_winner_that_is_not_exact_is_held_against_the_fastest_that_is(tmp_path: Path) -> None:
    rough = Candidate("rough", "parameter_server:asynchronous=true", lossless=False)
    candidates = [rough, Candidate("ddp", "ddp"), Candidate("allreduce", "allreduce")]
    step_s = {"rough": 0.01, "ddp": 0.02, "allreduce": 0.03}
    said = sentences(read_comparison(write_experiment(tmp_path / "e", candidates, step_s=step_s, repeats=4)))
    assert said[0].startswith("Pick rough")
    assert said[1].startswith("rough does not train by the mean gradient")
    assert re.match(r"The fastest that does is ddp: 2\d\.\d+ ms per step, 2\.0\d× the time", said[2])
    exact = sentences(read_comparison(write_experiment(tmp_path / "f", step_s=STEP_S, repeats=4)))
    assert "mean gradient" not in " ".join(exact)


def test_the_next_command_trains_with_the_winner(tmp_path: Path) -> None:
    settings = {"workload": "vgg11", "data": "cifar10", "batch": 64, "augment": False}
    command = next_command(
        read_comparison(write_experiment(tmp_path / "e", step_s=STEP_S, repeats=4, settings=settings))
    )
    assert command is not None
    assert shlex.split(command)[:3] == ["paceline", "train", "vgg11"]
    assert {"--no-augment", "--strategy", "--ranks"} < set(shlex.split(command))
    assert "--strategy ddp --ranks 2" in command
    assert "--steps" not in command


def test_the_next_command_measures_longer_where_it_is_open(tmp_path: Path) -> None:
    candidates = [Candidate(f"bn={bn}", "ddp", {"bn": bn}) for bn in ("local", "sync")]
    written = write_experiment(tmp_path / "e", candidates, repeats=1, step_s={"bn=local": 0.01, "bn=sync": 0.02})
    command = next_command(read_comparison(written))
    assert command is not None
    assert command.startswith("paceline compare")
    assert command.endswith("--vary bn=local,sync")
    assert "--steps 48" in command


@pytest.mark.parametrize("value", ["a b", "$(x)", "a'b"])
def test_the_next_command_is_quoted_for_a_shell(tmp_path: Path, value: str) -> None:
    written = write_experiment(tmp_path / "e", step_s=STEP_S, repeats=4, settings={"data_dir": value})
    command = next_command(read_comparison(written))
    assert command is not None
    assert value in shlex.split(command)


def test_a_comparison_of_equals_is_measured_longer_as_such(tmp_path: Path) -> None:
    candidates = [Candidate("ddp", "ddp"), Candidate("ddp (2)", "ddp")]
    written = write_experiment(tmp_path / "e", candidates, repeats=1, settings={"steps": None, "epochs": 3})
    command = next_command(read_comparison(written))
    assert command is not None
    assert "--strategies ddp,ddp" in command
    assert "--epochs 6" in command
    assert "--steps" not in command
