"""Tests of the verdict of a comparison and of the suggested next command."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments_on_disk import CLASSIC, falling, read_comparison, write_experiment, write_load
from paceline.records.experiment.design import Candidate
from paceline.records.experiment.record import read_experiment
from paceline.report.terminal.comparison import to_json
from paceline.report.verdict.next_command import next_command
from paceline.report.verdict.sentences import sentences

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


def test_beside_other_programs_a_speed_up_that_ranks_cannot_have_is_not_claimed(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", step_s=STEP_S, repeats=4)
    assert "ddp on 2 ranks is 4.0" in " ".join(sentences(read_comparison(path)))
    assert "--strategy ddp" in (next_command(read_comparison(path)) or "")
    comparison = read_comparison(write_load(path, 1.3))
    text = " ".join(sentences(comparison))
    assert text.startswith("Of the distributed strategies, pick ddp: 20.")
    assert "The speed-up of ddp on 2 ranks over one process is not known: 4.0" in text
    assert "measured while other programs used the cores, is more than 2 ranks can gain; its step would be" in text
    assert "ddp on 2 ranks is " not in text
    assert next_command(comparison) is None


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
    assert "no other distributed candidate was measured" in verdict(tmp_path, Candidate("ddp", "ddp"))


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


ASYNC = Candidate("async", "parameter_server:asynchronous=true", lossless=False)
DDP, ALLREDUCE, SINGLE = Candidate("ddp", "ddp"), Candidate("allreduce", "allreduce"), CLASSIC[0]
FAST_ASYNC = STEP_S | {"async": 0.01}


def written(path: Path, candidates: Sequence[Candidate], repeats: int = 4, **others: Any) -> Path:
    """Write an experiment in which `async` is faster than all, and does not step together."""
    made = write_experiment(path, candidates, **({"step_s": FAST_ASYNC, "repeats": repeats} | others))
    for file in made.rglob("run.json"):
        content = json.loads(file.read_text())
        content["topology"]["lockstep"] = content["topology"]["strategy"] != ASYNC.strategy
        file.write_text(json.dumps(content))
    return made


def set_accuracies(path: Path, of: Callable[[str, int], float]) -> Path:
    """Change the test accuracies of an experiment, given the strategy and the number of the repeat."""
    for file in path.rglob("summary.json"):
        content = json.loads(file.read_text())
        content["test"]["accuracy"] = of(content["strategy"], int(file.parent.parent.name.removeprefix("repeat-")))
        file.write_text(json.dumps(content))
    return path


def test_a_faster_one_that_does_not_compute_the_same_is_beside_the_headline_with_its_price(tmp_path: Path) -> None:
    path = written(tmp_path / "e", [ASYNC, DDP, ALLREDUCE])
    set_accuracies(path, lambda strategy, repeat: (0.6 if strategy == ASYNC.strategy else 0.9) + 0.004 * repeat)
    comparison = read_comparison(path)
    said = sentences(comparison)
    assert re.match(
        r"Pick ddp: 2\d\.\d+ ms per step, 1\.\d+× as fast as allreduce, the next best that computes", said[0]
    )
    assert re.fullmatch(
        r"async is (2\.\d+|1\.9\d)× as fast as ddp \(95% interval 1\.9\d–2\.\d+, 4 repeats\), but does not compute the "
        r"same: ranks do not wait for each other, so gradients are stale\. Its test accuracy is 30\.0 percentage "
        r"points lower than that of ddp \(−\d+\.\d to −\d+\.\d\)\.",
        said[1],
    )
    assert comparison.pick == "ddp"
    assert "--strategy ddp" in (next_command(comparison) or "")
    data = to_json(comparison)
    assert (data["pick"], data["decision"]["first"], data["decision"]["second"]) == ("ddp", "ddp", "allreduce")
    (alternative,) = data["alternatives"]
    assert (alternative["candidate"], alternative["instead_of"]) == ("async", "ddp")
    assert alternative["reason"] == "asynchronous"
    assert alternative["accuracy_gain"]["value"] == pytest.approx(-0.3)
    assert {row["name"]: row["exclusion"] for row in data["rows"]} == {
        "async": "asynchronous",
        "ddp": None,
        "allreduce": None,
    }
    exact = sentences(read_comparison(write_experiment(tmp_path / "f", step_s=STEP_S, repeats=4)))
    assert "compute the same" not in " ".join(exact)


def test_a_lossy_one_in_lockstep_is_no_winner_either(tmp_path: Path) -> None:
    lossy = Candidate("rough", "rough", lossless=False)
    path = write_experiment(tmp_path / "e", [lossy, DDP], step_s={"rough": 0.01, "ddp": 0.02}, repeats=4)
    said = sentences(read_comparison(path))
    assert re.match(r"ddp takes 2\d\.\d+ ms per step; no other distributed candidate computes the same\.", said[0])
    assert "rough is" in said[1]
    assert "it does not train with the mean gradient" in said[1]


def test_a_slower_one_that_does_not_compute_the_same_is_no_alternative(tmp_path: Path) -> None:
    path = written(tmp_path / "e", [ASYNC, DDP, ALLREDUCE], step_s=STEP_S | {"async": 0.09})
    comparison = read_comparison(path)
    assert comparison.alternatives == []
    assert "async is the slowest" in " ".join(sentences(comparison))


@pytest.mark.parametrize(
    ("repeats", "accuracy", "price"),
    [
        (2, 0.5, "Its test accuracy was 50.0%, that of ddp 50.0%, with 2 seeds: too few to say what that costs."),
        (4, 0.999, "It shows no measurable difference in test accuracy from ddp: 0.0 percentage points (−0.5 to 0.5)."),
        (
            4,
            0.5,
            "Its price in accuracy is not certain: its test accuracy was 50.0%, that of ddp 50.0%; paired by seed, the "
            "difference is 0.0 percentage points (",
        ),
        (4, None, "Its price in accuracy was not measured."),
        (4, 0.11, "Its price in accuracy is not known yet: the test accuracies are at chance level."),
    ],
)
def test_the_price_is_stated_no_more_certain_than_it_is(
    tmp_path: Path, repeats: int, accuracy: float | None, price: str
) -> None:
    path = written(tmp_path / "e", [ASYNC, DDP, ALLREDUCE], repeats, accuracy=accuracy)
    (said,) = [one for one in sentences(read_comparison(path)) if one.startswith(ASYNC.name)]
    assert price in said


def test_without_accuracies_the_price_is_in_test_loss(tmp_path: Path) -> None:
    path = written(tmp_path / "e", [ASYNC, DDP, ALLREDUCE])
    for file in path.rglob("summary.json"):
        content = json.loads(file.read_text())
        content["test"]["accuracy"] = None
        file.write_text(json.dumps(content))
    said = sentences(read_comparison(path))[1]
    assert re.search(r"Its test loss was \d\.\d+, that of ddp \d\.\d+; the workload defines no accuracy\.", said)


def test_one_process_is_picked_over_those_that_do_not_compute_the_same(tmp_path: Path) -> None:
    comparison = read_comparison(written(tmp_path / "e", [SINGLE, ASYNC]))
    said = sentences(comparison)
    assert re.match(
        r"Train in one process: 4\d\.\d+ ms per step; no distributed candidate computes the same\.", said[0]
    )
    assert said[1].startswith("async is ")
    assert "as fast as single" in said[1]
    assert comparison.pick == "single"
    assert "--strategy single --ranks 1" in (next_command(comparison) or "")


def test_without_any_that_computes_the_same_none_is_recommended(tmp_path: Path) -> None:
    rough = Candidate("rough", "rough", lossless=False)
    comparison = read_comparison(written(tmp_path / "e", [ASYNC, rough]))
    said = sentences(comparison)
    assert said[0].startswith("No candidate computes the same as one process: async (asynchronous) takes 10.")
    assert "ick" not in " ".join(said)
    assert comparison.pick is None
    command = next_command(comparison) or ""
    assert command.startswith("paceline compare ")
    assert "--strategies ddp,parameter_server:asynchronous=true" in command
    assert "--steps 12" in command


def test_a_faster_alternative_that_diverged_in_a_repeat_is_not_offered(tmp_path: Path) -> None:
    def losses(candidate: Candidate, repeat: int, step: int) -> float:
        lost = candidate.name == "lossy" and repeat == 1 and step > 5
        return 100.0 if lost else falling(candidate, repeat, step)

    candidates = [Candidate("lossy", "lossy", lossless=False), Candidate("ddp", "ddp")]
    times = {"lossy": 0.01, "ddp": 0.03}
    path = write_experiment(tmp_path / "e", candidates, repeats=4, steps=40, step_s=times, losses=losses)
    comparison = read_comparison(path)
    assert comparison.row("lossy").exclusion == "diverged"
    assert comparison.alternatives == []
    assert comparison.decision.first == "ddp"
    unharmed = read_comparison(write_experiment(tmp_path / "f", candidates, repeats=4, steps=40, step_s=times))
    assert [one.row.candidate.name for one in unharmed.alternatives] == ["lossy"]


def test_an_alternative_that_diverges_where_all_do_keeps_its_reason(tmp_path: Path) -> None:
    candidates = [Candidate("lossy", "lossy", lossless=False), Candidate("ddp", "ddp")]
    path = write_experiment(tmp_path / "e", candidates, steps=40, losses=lambda _, __, step: 100.0 if step > 5 else 2.0)
    assert read_comparison(path).row("lossy").exclusion == "lossy"


def test_a_diverged_candidate_is_not_picked_unless_all_diverged(tmp_path: Path) -> None:
    def only_ddp(candidate: Candidate, repeat: int, step: int) -> float:
        return math.nan if candidate.name == "ddp" and repeat == 1 and step > 5 else 2.0

    comparison = read_comparison(write_experiment(tmp_path / "e", step_s=STEP_S, repeats=4, losses=only_ddp))
    assert comparison.row("ddp").exclusion == "diverged"
    assert comparison.decision.first == "allreduce"
    assert "ddp is" not in " ".join(sentences(comparison)), "it is no alternative: its training went wrong"

    def everyone(candidate: Candidate, repeat: int, step: int) -> float:  # noqa: ARG001
        return math.nan if repeat == 1 and step > 5 else 2.0

    comparison = read_comparison(write_experiment(tmp_path / "f", step_s=STEP_S, repeats=4, losses=everyone))
    assert comparison.pick == "ddp", "its speed is known"
    assert next_command(comparison) is None, "but training with these settings is no good advice"


def test_a_candidate_with_differing_replicas_is_not_picked(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", step_s=STEP_S, repeats=4)
    for file in path.rglob("repeat-2/4/summary.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"weight_divergence": 0.2}))
    comparison = read_comparison(path)
    assert comparison.row("ddp").exclusion == "replicas_differ"
    assert comparison.decision.first == "allreduce"


def test_a_failed_candidate_is_not_picked(tmp_path: Path) -> None:
    comparison = read_comparison(write_experiment(tmp_path / "e", step_s=STEP_S, failures={"ddp": "it broke."}))
    assert comparison.decision.first == "allreduce"
    assert "ddp" not in sentences(comparison)[0]


def test_more_repeats_are_needed_while_an_alternative_to_the_only_one_is_unclear(tmp_path: Path) -> None:
    clear = read_comparison(written(tmp_path / "e", [ASYNC, DDP]))
    assert clear.decision.outcome == "single_candidate"
    assert clear.is_clear
    assert not read_comparison(written(tmp_path / "f", [ASYNC, DDP], repeats=1)).is_clear


def test_the_next_command_trains_with_the_winner(tmp_path: Path) -> None:
    settings = {"workload": "vgg11", "data": "cifar10", "batch": 64, "augment": False}
    command = next_command(
        read_comparison(write_experiment(tmp_path / "e", step_s=STEP_S, repeats=4, settings=settings))
    )
    assert command is not None
    assert shlex.split(command)[:3] == ["paceline", "train", "vgg11"]
    assert {"--no-augment", "--strategy", "--ranks"} < set(shlex.split(command))
    assert "--strategy ddp --ranks 2" in command
    assert not {"--steps", "--epochs"} & set(shlex.split(command)), "the default length, which the user did not change"


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({"steps": 40}, ""),
        ({"steps": None, "seconds": 30.0}, ""),
        ({"steps": None, "epochs": 2}, "--epochs 2"),
        ({"steps": 40, "epochs": 5}, "--epochs 5"),
    ],
)
def test_the_next_command_trains_as_long_as_the_user_asked(tmp_path: Path, given: dict[str, Any], length: str) -> None:
    path = write_experiment(tmp_path / "e", step_s=STEP_S, repeats=4, settings=given)
    command = next_command(read_comparison(path))
    assert command == " ".join(["paceline train", *([length] if length else []), "--strategy ddp --ranks 2"])


MEASURING = {
    "slow_rank": "1:3",
    "evaluate": False,
    "eval_ranks": True,
    "events": False,
    "profile": "3-4",
    "tensorboard": True,
    "log_every": 5,
}
"""Settings that only say what is measured, and under which conditions."""


@pytest.mark.parametrize("decided", [True, False])
def test_the_next_command_repeats_nothing_that_is_only_about_measuring(tmp_path: Path, decided: bool) -> None:
    step_s = STEP_S if decided else STEP_S | {"allreduce": 0.02}
    for name, value in MEASURING.items():
        path = write_experiment(tmp_path / name, step_s=step_s, repeats=2 + 2 * decided, settings={name: value})
        command = next_command(read_comparison(path))
        if name == "slow_rank" and not decided:
            assert command is None, "without the slow rank, the command would measure something else"
            continue
        assert command is not None
        assert command.startswith("paceline train" if decided else "paceline compare")
        assert name.replace("_", "-") not in command


def test_the_next_command_repeats_settings_of_training(tmp_path: Path) -> None:
    training = {"lr": 0.02, "momentum": 0.5, "clip_norm": 1.0, "bn": "sync", "precision": "bf16", "accumulate": 2}
    training |= {
        "allow_unused": True,
        "seed": 5,
        "channels_last": True,
        "timeout": 300.0,
        "batch": 64,
        "data": "cifar10",
    }
    path = write_experiment(tmp_path / "e", step_s=STEP_S, repeats=4, settings=training)
    words = shlex.split(next_command(read_comparison(path)) or "")
    assert {f"--{name.replace('_', '-')}" for name in training} <= set(words)


def test_the_next_command_trains_on_real_hosts_in_place_of_emulated_ones(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", step_s=STEP_S, repeats=4)
    file = path / "experiment.json"
    content = json.loads(file.read_text())
    content["design"] |= {"hosts": 2, "ranks_per_host": 1, "emulated": "2@200mbit", "host_cpus": 1.0}
    file.write_text(json.dumps(content))
    command = next_command(read_comparison(path)) or ""
    assert "--hosts 2 --node-rank R --master ADDRESS:PORT" in command
    assert "--emulate" not in command


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


QUICK = Candidate("recipe=classic", "ddp", {"recipe": "classic"})
GOOD = Candidate("recipe=default", "ddp", {"recipe": "default"})
RECIPE_TIMES = {"recipe=classic": 0.02, "recipe=default": 0.03}


def of_recipes(path: Path, values: dict[str, float], repeats: int = 4, spread: float = 0.004, **times: Any) -> Path:
    """Write a comparison of two recipes, of which `classic` is faster, with the test accuracies given."""
    made = write_experiment(path, [QUICK, GOOD], step_s=RECIPE_TIMES | times, repeats=repeats)
    for entry in read_experiment(made).runs:
        file = Path(entry.run.path) / "summary.json"
        content = json.loads(file.read_text())
        content["test"]["accuracy"] = values[entry.candidate.name] + spread * entry.repeat
        file.write_text(json.dumps(content))
    return made


def test_the_fastest_setting_is_not_recommended_if_another_learns_better(tmp_path: Path) -> None:
    path = of_recipes(tmp_path / "e", {"recipe=classic": 0.80, "recipe=default": 0.95})
    comparison = read_comparison(path)
    said = sentences(comparison)
    assert re.fullmatch(
        r"recipe=classic is the fastest: 2\d\.\d+ ms per step, 1\.\d+× as fast as recipe=default, the next best "
        r"\(95% interval 1\.\d+–1\.\d+, 4 repeats\)\. But recipe=default reaches a higher test accuracy than "
        r"recipe=classic, 95\.6% instead of 80\.6%: 15\.0 percentage points more \(\d+\.\d–\d+\.\d\), which exceeds "
        r"the spread between seeds; it takes 1\.\d+× the time per sample\.",
        said[0],
    )
    assert not any(sentence.startswith("Pick") for sentence in said)
    assert sum("test accuracy" in sentence for sentence in said) == 1, "it is said once"
    assert comparison.pick is None
    assert "--recipe default" in (next_command(comparison) or "")
    learning = to_json(comparison)["learning"]
    assert (learning["best"], learning["other"], learning["is_clear"]) == ("recipe=default", "recipe=classic", True)
    assert learning["difference"]["value"] == pytest.approx(0.15)


def test_a_difference_within_the_spread_between_seeds_is_said_beside_the_pick(tmp_path: Path) -> None:
    path = of_recipes(tmp_path / "e", {"recipe=classic": 0.940, "recipe=default": 0.945}, spread=0.01)
    comparison = read_comparison(path)
    said = sentences(comparison)
    assert comparison.pick == "recipe=classic"
    assert said[0].startswith("Pick recipe=classic: ")
    assert re.search(
        r"recipe=default reached the highest test accuracy, 96\.0%, recipe=classic 95\.5%; the difference of 0\.5 "
        r"percentage points \(−\d\.\d to \d\.\d\) is within the spread between seeds\.",
        " ".join(said),
    )


def test_the_fastest_setting_that_also_learns_best_is_the_pick(tmp_path: Path) -> None:
    path = of_recipes(tmp_path / "e", {"recipe=classic": 0.95, "recipe=default": 0.80})
    comparison = read_comparison(path)
    said = " ".join(sentences(comparison))
    assert comparison.pick == "recipe=classic"
    assert "recipe=classic reaches a higher test accuracy than recipe=default, 95.6% instead of 80.6%: 15.0" in said


def test_too_few_seeds_say_nothing_about_what_is_learned(tmp_path: Path) -> None:
    path = of_recipes(tmp_path / "e", {"recipe=classic": 0.80, "recipe=default": 0.95}, repeats=2)
    said = " ".join(sentences(read_comparison(path)))
    assert (
        "recipe=default reached a test accuracy of 95.2%, recipe=classic 80.2%, with 2 seeds: too few to say which"
        in said
    )


def test_a_better_setting_is_named_where_speeds_show_no_winner(tmp_path: Path) -> None:
    values = {"recipe=classic": 0.80, "recipe=default": 0.95}
    path = of_recipes(tmp_path / "e", values, **{"recipe=default": 0.02})
    comparison = read_comparison(path)
    assert comparison.decision.outcome != "winner"
    assert "recipe=default reaches a higher test accuracy than recipe=classic" in " ".join(sentences(comparison))
    assert "--recipe default" in (next_command(comparison) or "")


def test_without_accuracies_settings_are_judged_by_test_loss(tmp_path: Path) -> None:
    path = of_recipes(tmp_path / "e", {"recipe=classic": 0.80, "recipe=default": 0.95})
    for entry in read_experiment(path).runs:
        file = Path(entry.run.path) / "summary.json"
        content = json.loads(file.read_text())
        content["test"]["accuracy"] = None
        content["test"]["loss"] = (0.2 if entry.candidate.name == GOOD.name else 0.5) + 0.01 * entry.repeat
        file.write_text(json.dumps(content))
    comparison = read_comparison(path)
    assert comparison.pick is None
    assert (
        "recipe=default reaches a lower test loss than recipe=classic, 0.2150 instead of 0.5150: 0.3000 less"
        in sentences(comparison)[0]
    )


def test_strategies_with_the_same_settings_are_not_judged_by_accuracy(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", [DDP, ALLREDUCE], step_s=STEP_S, repeats=4)
    set_accuracies(path, lambda strategy, repeat: (0.8 if strategy == "ddp" else 0.95) + 0.004 * repeat)
    comparison = read_comparison(path)
    assert comparison.learning is None
    assert comparison.pick == "ddp"
