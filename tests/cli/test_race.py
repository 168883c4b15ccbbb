"""`paceline race` from the command line, with real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import paceline
from paceline.analysis.other_load import OtherLoad
from paceline.cli.main import parse, run
from paceline.cli.race import RaceRequest
from paceline.config import RaceConfig
from paceline.errors import RecordError, UsageError
from paceline.records.events import EvaluationEvent
from paceline.records.experiment.record import read_experiment
from paceline.report.page.race import render_race
from races_on_disk import FLAT, RISING, write_race
from report.page.test_comparison import Reader

pytestmark = pytest.mark.takes(10)

DIGITS = ("race", "cnn", "--data", "digits", "--ranks", "2", "--batch", "64", "--no-events")


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A race to 97%, shared by the tests that only read it."""
    out = tmp_path_factory.mktemp("race") / "out"
    done = paceline(*DIGITS, "--target", "0.97", "--runs", "3", "--out", str(out), "--json", ranks=6)
    result: dict[str, Any] = json.loads(done.stdout)
    return result | {"out": out, "messages": done.stderr}


def test_every_run_ends_at_the_first_evaluation_that_reaches_the_target(raced: dict[str, Any]) -> None:
    assert [own["seed"] for own in raced["runs"]] == [0, 1, 2]
    for own, entry in zip(raced["runs"], read_experiment(raced["out"]).runs, strict=True):
        tested = [event.test.accuracy or 0.0 for event in entry.run.events_of(EvaluationEvent)]
        assert all(accuracy < 0.97 for accuracy in tested[:-1])
        assert own["accuracy"] == tested[-1] >= 0.97
        assert entry.run.summary is not None
        assert entry.run.summary.steps == own["step"] == 23 * len(tested) < 460
        assert 0 < own["train_s"] < own["total_s"]
        assert own["start_up_s"] + own["train_s"] + own["evaluation_s"] < own["total_s"] + 0.01


def test_the_score_is_the_middle_run_and_the_rules_are_shown(raced: dict[str, Any]) -> None:
    assert raced["score_s"] == sorted(own["train_s"] for own in raced["runs"])[1]
    assert raced["rules"]["target"] == "97% test accuracy"
    assert raced["rules"]["runs"].startswith("3, seeds 0 to 2")
    assert Path(raced["report"]).stat().st_size > 1e6
    assert "epoch  rank  validation loss  validation accuracy  learning rate  wall time" in raced["messages"]
    assert raced["messages"].count("  all  ") == sum(own["evaluations"] for own in raced["runs"])


def test_a_finished_race_goes_on_with_more_runs_only(raced: dict[str, Any]) -> None:
    done = paceline(
        *DIGITS, "--target", "0.97", "--runs", "3", "--out", str(raced["out"]), expect=RecordError.exit_code
    )
    assert "larger --runs measures more" in done.stderr


def test_runs_that_miss_the_target_are_shown_and_give_no_score(tmp_path: Path) -> None:
    what = (*DIGITS, "--target", "0.99", "--runs", "1", "--steps", "12", "--eval-every", "6", "--out")
    done = paceline(*what, str(tmp_path / "out"))
    assert "missed" in done.stdout
    assert "No score: 1 of 1 run missed the target of 99%." in done.stdout


def test_the_leaderboard_names_groups_and_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_race(tmp_path / "one", [1.0])
    write_race(tmp_path / "two", [2.0])
    write_race(tmp_path / "other", [0.5], cpu="another processor")
    assert run(["race", "--leaderboard", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "another processor" in shown
    assert "2 groups: places count only among races of the same task on the same hardware." in shown
    assert run(["race", "--leaderboard", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [[one["place"] for one in group["races"]] for group in found["groups"]] == [[1, 2], [1]]


def test_the_leaderboard_shows_what_else_may_explain_the_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_race(tmp_path / "one", [1.0, 2.0, 3.0], torch="2.14.0")
    write_race(tmp_path / "two", [2.0])
    load = OtherLoad(least=0.5, most=1.0, cores=2, runs=3, explained=None)
    monkeypatch.setattr("paceline.analysis.race.leaderboard.other_load", lambda _: load)
    assert run(["race", "--leaderboard", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"  {tmp_path / 'one'}: other programs used 0.5–1.0 of 2 cores, torch 2.14.0\n" in shown
    assert f"{tmp_path / 'two'}: only 1 run, so none is left out of the score; other programs used 0.5" in shown
    assert "Other programs used cores during some races, which makes their times longer." in shown
    assert "Some races of a group were measured with other versions of the software." in shown
    assert run(["race", "--leaderboard", str(tmp_path), "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert [one["software"] for one in group["races"]] == [{"torch": "2.13.0"}, {"torch": "2.14.0"}][::-1]
    assert group["races"][0]["other_load"]["most"] == 1.0


@pytest.mark.parametrize("others", [["--target", "0.9"], ["resnet18"], ["--out", "elsewhere"]])
def test_the_leaderboard_takes_no_other_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], others: list[str]
) -> None:
    write_race(tmp_path / "one", [1.0])
    assert run(["race", "--leaderboard", str(tmp_path), *others]) == UsageError.exit_code
    assert "--leaderboard lists races and trains nothing, but other options were given." in capsys.readouterr().err


def test_the_page_marks_misses_and_shows_the_rules(tmp_path: Path) -> None:
    from paceline.analysis.race.race import race
    from paceline.analysis.record_set import collect_records

    path = write_race(tmp_path / "race", [1.0, 2.0, 3.0], [RISING, FLAT, RISING], compile_s=2.0)
    page = render_race(race(collect_records([read_experiment(path)])))
    assert "run 2: missed" in page
    assert {v for n, v in Reader(page).attributes if n == "aria-describedby"} <= {
        v for n, v in Reader(page).attributes if n == "id"
    }
    assert "target 90%" in page
    assert "Training + compiling" in page
    assert "Test-time augmentation" in page


def test_a_race_without_a_target_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["race", "cnn"]) == 2
    assert "a race needs a target accuracy.\nhint: give it with --target" in capsys.readouterr().err


def test_a_toml_file_is_a_whole_race() -> None:
    course = Path(__file__).parents[2] / "examples" / "svhn_course.toml"
    request = parse(["race", "--config", str(course)])
    assert isinstance(request, RaceRequest)
    assert request.race == RaceConfig(target=0.9, runs=3, eval_every="500")
    assert (request.run.data, request.run.steps, request.launch.ranks) == ("svhn:extra=true", 14500, 3)
