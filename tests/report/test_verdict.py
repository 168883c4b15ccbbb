"""Tests of the verdict of a comparison and of the suggested next command."""

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
    assert "1.51× as fast as allreduce, the next best (95% interval 1.47–1.54, 4 repeats)." in text


def test_the_level_of_the_interval_depends_on_the_number_of_interim_analyses(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", step_s=STEP_S, repeats=4)
    file = path / "experiment.json"
    content = json.loads(file.read_text())
    content["design"]["interim_analyses"] = 2
    file.write_text(json.dumps(content))
    text = " ".join(sentences(read_comparison(path)))
    assert re.search(r"the next best \(97\.5% interval 1\.4\d–1\.5\d, 4 repeats\)\.", text)


def test_distributing_is_judged_against_one_process(tmp_path: Path) -> None:
    assert "ddp on 2 ranks is 4.0" in verdict(tmp_path)
    slow = STEP_S | {"single": 0.002}
    text = verdict(tmp_path / "slow", step_s=slow)
    assert text.startswith("Train in one process: 2.0")
    assert "5.0" in text
    assert "as fast as ddp on 2 ranks; ddp's step would be 50% shorter if nothing were exchanged." in text
    assert "Of the distributed strategies, pick ddp: 20." in text
    comparison = read_comparison(tmp_path / "slow" / "e")
    assert comparison.pick == "single"
    assert "--strategy single" in (next_command(comparison) or "")


def test_without_a_baseline_the_bound_gives_the_possible_gain(tmp_path: Path) -> None:
    candidates = [candidate for candidate in CLASSIC if candidate.role != "baseline"]
    most = "ddp: its step would be 50% shorter if nothing were exchanged; no other strategy can gain more than that."
    assert most in verdict(tmp_path, *candidates)
    assert most in verdict(tmp_path / "events", *candidates, events=True), "exposed communication is not all of it"


def test_exposed_communication_alone_gives_no_possible_gain(tmp_path: Path) -> None:
    text = verdict(tmp_path, *CLASSIC[2:], events=True)
    assert "ddp: 19% of its step is exposed communication." in text
    assert "can gain more" not in text


@pytest.mark.parametrize(("events", "called"), [(True, True), (False, False)])
def test_only_measured_communication_is_called_exposed(tmp_path: Path, events: bool, called: bool) -> None:
    assert ("exposed" in verdict(tmp_path, events=events)) == called


def test_equals_have_no_winner(tmp_path: Path) -> None:
    text = verdict(tmp_path, step_s=STEP_S | {"allreduce": 0.02})
    assert "Pick" not in text
    assert "equally fast" in text or "No clear winner" in text


def test_an_undecided_comparison_names_its_interval(tmp_path: Path) -> None:
    text = verdict(tmp_path, step_s=STEP_S | {"allreduce": 0.0205}, repeats=3)
    assert re.search(
        r"No clear winner: \w+ takes 1\.0\d× the time of \w+, but the interval \(0\.\d\d–1\.\d\d, 3 repeats\) includes "
        r"equal speed \(differences below 1% count as none\)\. More repeats or longer runs may decide it\.",
        text,
    )


def test_one_repeat_is_one_measurement(tmp_path: Path) -> None:
    text = verdict(tmp_path, repeats=1)
    assert re.search(r"ddp was 1\.\d\d× as fast as allreduce in one repeat, a single measurement\. An interval", text)
    assert re.search(r"ddp on 2 ranks was \d\.\d+× as fast as one process in one repeat, a single measurement;", text)
    assert "no measurable difference" not in text


def test_of_two_repeats_the_verdict_says_what_each_showed(tmp_path: Path) -> None:
    """Two repeats in which a strategy is three times slower do not show that it may be as fast."""
    slow = verdict(tmp_path / "slow", step_s=STEP_S | {"single": 0.0033}, repeats=2)
    assert re.search(
        r"ddp on 2 ranks was slower than one process in both repeats: 0\.3\d×( and 0\.3\d×)? as fast;", slow
    )
    assert re.search(
        r"^ddp was faster than allreduce in both repeats: 1\.5\d× and 1\.\d\d× as fast\. An interval", slow
    )
    assert "An interval needs 3 repeats: --repeats 3 may decide it." in slow
    assert "interval (" not in slow
    assert "Pick" not in slow


def test_two_repeats_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    text = verdict(tmp_path, step_s=STEP_S | {"allreduce": 0.02}, repeats=2)
    assert "ddp was 1.02× and 0.99× as fast as allreduce in two repeats, which contradict each other. An" in text


def test_one_candidate_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    assert "there is nothing to compare it with" in verdict(tmp_path, Candidate("ddp", "ddp"))


def test_the_verdict_says_that_nothing_was_measured(tmp_path: Path) -> None:
    text = verdict(tmp_path, repeats=0, interrupted=True)
    assert "No candidate was timed, so there is none to pick." in text
    assert "interrupted" in text


def test_a_rank_that_moves_most_bytes_is_named(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", [Candidate("gather_scatter", "gather_scatter"), Candidate("ddp", "ddp")])
    for file in path.rglob("repeat-*/1/summary.json"):
        summary = json.loads(file.read_text())
        summary["traffic"] |= {"sent_bytes": [300, 100], "received_bytes": [300, 100]}
        file.write_text(json.dumps(summary))
    text = " ".join(sentences(read_comparison(path)))
    assert "gather_scatter: rank 0 sends and receives 3.00× the bytes of any other rank." in text


def test_accuracies_at_chance_level_are_not_compared(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", accuracy=0.11)
    for file in path.rglob("run.json"):
        content = json.loads(file.read_text())
        content["topology"]["classes"] = 10
        file.write_text(json.dumps(content))
    assert "All test accuracies are at chance level (10%)" in " ".join(sentences(read_comparison(path)))


def test_an_accuracy_beyond_the_spread_between_seeds_is_reported(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=4)
    for file in path.rglob("repeat-*/3/summary.json"):
        summary = json.loads(file.read_text())
        summary["test"]["accuracy"] -= 0.2
        file.write_text(json.dumps(summary))
    assert "allreduce: the test accuracy is 20.0 percentage points lower than that of ddp" in " ".join(
        sentences(read_comparison(path))
    )


def test_a_lossy_winner_is_compared_with_the_fastest_lossless_one(tmp_path: Path) -> None:
    rough = Candidate("rough", "parameter_server:asynchronous=true", lossless=False)
    candidates = [rough, Candidate("ddp", "ddp"), Candidate("allreduce", "allreduce")]
    step_s = {"rough": 0.01, "ddp": 0.02, "allreduce": 0.03}
    said = sentences(read_comparison(write_experiment(tmp_path / "e", candidates, step_s=step_s, repeats=4)))
    assert said[0].startswith("Pick rough")
    assert said[1].startswith("rough does not train with the mean gradient")
    lossless = r"The fastest that trains with the mean gradient is ddp: 2\d\.\d+ ms per step, 2\.0\d× the time of rough"
    assert re.match(lossless, said[2])
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


def test_the_next_command_measures_longer_without_a_winner(tmp_path: Path) -> None:
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


def test_the_next_command_keeps_a_comparison_of_a_strategy_with_itself(tmp_path: Path) -> None:
    candidates = [Candidate("ddp", "ddp"), Candidate("ddp (2)", "ddp")]
    written = write_experiment(tmp_path / "e", candidates, repeats=1, settings={"steps": None, "epochs": 3})
    command = next_command(read_comparison(written))
    assert command is not None
    assert "--strategies ddp,ddp" in command
    assert "--epochs 6" in command
    assert "--steps" not in command
