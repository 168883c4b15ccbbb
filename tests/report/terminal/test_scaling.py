"""Tests of the verdict of a scaling experiment, its terminal output, JSON, CSV and live display."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from experiments_on_disk import write_load
from paceline.analysis.scaling.curves import Scaling
from paceline.config import RunConfig
from paceline.records.experiment.design import Candidate, ScaleShape
from paceline.report.live.scaling_table import ScalingLiveTable
from paceline.report.scaling_verdict import sentences
from paceline.report.tables.scaling import write_scaling_tables
from paceline.report.terminal.scaling import print_scaling, to_json
from run_models import scale_design
from scaling_on_disk import ONE_HOST, even, points, read_scaling, write_scaling, write_superlinear

pytestmark = pytest.mark.takes(6)


def printed(found: Scaling, width: int = 100) -> str:
    file = io.StringIO()
    print_scaling(found, Console(file=file, width=width))
    return file.getvalue()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Scaling:
    """Strong and weak scaling on hosts of half a core."""
    return read_scaling(write_scaling(tmp_path_factory.mktemp("scaling") / "e", repeats=3, events=True))


def test_the_answer_in_sentences(found: Scaling) -> None:
    verdict = sentences(found)
    assert (
        verdict[0]
        == "ddp on 4 ranks is 2.72× (2.72–2.72) as fast as one process: 95.88 ms per step, efficiency 68% (68–68%)."
    )
    text = "\n".join(verdict)
    assert "Strong scaling: ddp is fastest on 4 ranks, the most that were measured (2 to 4 ranks: " in text
    assert "Strong scaling: gather_scatter is fastest on 2 ranks: on 4 a step takes 1.10×" in text
    assert (
        "Weak scaling: A step of gather_scatter on 4 ranks takes 2.88× (2.87–2.88) as long as with one process" in text
    )


def test_beside_other_programs_a_speed_up_that_ranks_cannot_have_is_not_claimed(tmp_path: Path) -> None:
    path = write_superlinear(tmp_path / "e")
    assert re.match(r"ddp on 2 ranks is 1\d\.\d\d× .*as fast as one process", sentences(read_scaling(path))[0])
    headline, *others = sentences(read_scaling(write_load(path, 1.3)))
    assert headline.startswith("The speed-up of ddp on 2 ranks over one process is not known: 1")
    assert "measured while other programs used the cores, is more than 2 ranks can gain; it takes " in headline
    assert [sentence for sentence in others if "as fast as one process, more than 2 ranks can gain" in sentence]


def test_oversubscribed_points_are_not_compared_with_the_fastest(tmp_path: Path) -> None:
    shapes = [(1, 1), (1, 2), (1, 4)]
    path = write_scaling(tmp_path / "e", shapes=shapes, modes=["strong"], repeats=3, design=ONE_HOST, cores=2.0)
    text = "\n".join(sentences(read_scaling(path)))
    assert "ddp is fastest on 2 ranks, the largest world size with enough cores or GPUs for every rank (1 to 2" in text


def test_a_point_that_failed_was_not_measured(tmp_path: Path) -> None:
    largest = [candidate.name for candidate in points(["ddp"], [(4, 1)], ["strong"], 256, 64)]
    failures = dict.fromkeys(largest, "it broke")
    path = write_scaling(tmp_path / "e", modes=["strong"], repeats=3, failures=failures)
    text = "\n".join(sentences(read_scaling(path)))
    assert "ddp is fastest on 2 ranks, the most that were measured (1 to 2 ranks: " in text


def test_a_slowdown_on_more_ranks_is_reported(tmp_path: Path) -> None:
    def step_s(candidate: Candidate, repeat: int) -> float:
        assert candidate.point is not None
        slow = candidate.strategy == "gather_scatter" and candidate.point.ranks == 4
        return even(candidate, repeat) * (3 if slow else 1)

    verdict = sentences(read_scaling(write_scaling(tmp_path / "e", step_s=step_s, modes=["strong"], repeats=3)))
    assert any("gather_scatter on 4 ranks is slower than one process: 0.4" in sentence for sentence in verdict)


def test_one_process_is_advised_where_ranks_gain_nothing(tmp_path: Path) -> None:
    def step_s(candidate: Candidate, repeat: int) -> float:
        return even(candidate, repeat) * (0.1 if candidate.strategy == "single" else 1)

    verdict = sentences(read_scaling(write_scaling(tmp_path / "e", step_s=step_s, modes=["strong"], repeats=3)))
    assert verdict[0].startswith("Train in one process: ddp on 4 ranks, the fastest distributed run, is only 0.27×")


END = r"[\d.,]+(?: [kM])?"
RATIO = re.compile(rf"(?P<value>[\d.,]+)× (?:\((?:(?P<low>{END})–(?P<high>{END})|n = (?P<repeats>\d+))\))?")


def value_of(end: str) -> float:
    """Return the value of an end of an interval as it is written."""
    digits, _, unit = end.replace(",", "").partition(" ")
    return float(digits) * {"": 1, "k": 1e3, "M": 1e6}[unit]


@pytest.mark.parametrize("noise", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("repeats", [3, 4])
@pytest.mark.parametrize("gain", [0.3, 1.0, 2.0])
def test_no_sentence_is_more_certain_than_its_interval(tmp_path: Path, noise: float, repeats: int, gain: float) -> None:
    """A clause says "no measurable difference" if and only if its interval contains 1."""
    drawn = random.Random(repeats)

    def step_s(candidate: Candidate, repeat: int) -> float:
        return even(candidate, repeat) / (gain if candidate.role != "baseline" else 1) * math.exp(drawn.gauss(0, noise))

    shapes = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
    found = read_scaling(write_scaling(tmp_path / "e", shapes=shapes, step_s=step_s, repeats=repeats))
    verdict = sentences(found)
    clauses = [clause for sentence in verdict for clause in sentence.split("; ") if "×" in clause]
    assert len(clauses) > 20
    for clause in clauses:
        (ratio,) = RATIO.finditer(clause)
        assert ratio["low"] or ratio["repeats"], clause
        open_ = bool(ratio["repeats"]) or value_of(ratio["low"]) <= 1 <= value_of(ratio["high"])
        rounded = ratio["low"] == "1.00" or ratio["high"] == "1.00"
        assert rounded or ("no measurable" in clause) == open_, clause
    text = printed(found)
    assert "no interval" not in text
    assert "no interval" not in "".join(verdict)


def test_of_two_repeats_both_values_are_shown(tmp_path: Path) -> None:
    def step_s(candidate: Candidate, repeat: int) -> float:
        return even(candidate, repeat) * (1.5 if repeat and candidate.strategy == "ddp" and candidate.point else 1)

    found = read_scaling(write_scaling(tmp_path / "e", step_s=step_s, repeats=2, modes=["strong"]))
    verdict = "\n".join(sentences(found))
    assert re.search(r"ddp on 4 ranks is 2\.\d\d× \(2\.7\d× and 1\.8\d×\) as fast as one process", verdict)
    unsure = (
        r"ddp on 2 ranks is|On one rank, .* no measurable difference for gather_scatter|1\.22× \(1\.00× and 1\.50×\)"
    )
    assert re.search(unsure, verdict)
    assert "Two repeats give no interval; both values are shown, so no difference here is certain." in verdict
    text = printed(found, 140)
    assert re.search(r"2\.\d\d× +\(2\.7\d, 1\.8\d\)", text)
    assert "Two values in parentheses are those of two repeats, which give no interval." in text
    assert "±" not in text
    four = to_json(found)["modes"]["strong"]["points"][3]["over_single"]["speed_up"]
    assert (four["low"], len(four["each"])) == (None, 2)


def test_a_wide_interval_is_replaced_by_the_number_of_repeats(tmp_path: Path) -> None:
    def step_s(candidate: Candidate, repeat: int) -> float:
        return even(candidate, repeat) * (9 if repeat == 2 and candidate.strategy == "ddp" else 1)

    found = read_scaling(write_scaling(tmp_path / "e", step_s=step_s, repeats=3, modes=["strong"], events=True))
    verdict = sentences(found)
    unsure = (
        "Strong scaling: ddp on 4 ranks shows no measurable difference in speed from one process: 2.72× (n = 3) as fast"
    )
    assert f"{unsure}; it is" in "\n".join(verdict)
    assert ">±100%" in printed(found)


def test_the_terminal_has_a_table_per_kind_within_100_columns(found: Scaling) -> None:
    text = printed(found)
    table = [line for line in text.splitlines() if line.startswith(("strategy", "single", "ddp  ", "gather_scatter  "))]
    assert len(table) == 2 * 4
    assert max(map(len, table)) <= 100
    assert "Strong scaling: the global batch stays at 256, so more ranks get fewer samples each." in text
    assert "Weak scaling: every rank gets 64 samples, so the global batch grows with the ranks, from 64 to 256." in text
    assert "vs single" in text
    assert "vs itself" in text
    (last,) = [line for line in text.splitlines() if line.split()[:2] == ["4/4", "256"] and "95.88" in line][:1]
    assert " ".join(last.split()[2:]) == "95.88 ms ±5% 2.72× ±0% 68% 2.72× ±0% 68% 69% ±0 19% ±0"
    wide = printed(found, 120)
    assert max(map(len, [line for line in wide.splitlines() if "95.88" in line and "4/4" in line])) <= 120
    assert "479.40 ms" in wide


def test_an_unclaimed_speed_up_is_a_dash_with_a_reason(tmp_path: Path) -> None:
    path = write_scaling(
        tmp_path / "e", shapes=[(1, 1), (1, 4)], design=ONE_HOST, cores=2.0, modes=["strong"], repeats=1
    )
    text = printed(read_scaling(path))
    (line, _) = [line for line in text.splitlines() if line.split()[:2] == ["4", "*"]]
    assert "×" not in line
    assert "note: 4 ranks share 2 cores, so no speed-up or efficiency is reported for them." in text
    assert text.count("One repeat gives no interval") == 1


def test_an_interrupted_experiment_without_a_measurement_is_printed(tmp_path: Path) -> None:
    text = printed(read_scaling(write_scaling(tmp_path / "e", repeats=0, interrupted=True)))
    assert "No step was timed." in text
    assert "This experiment was interrupted" in text


@pytest.mark.parametrize(
    ("lr", "note"),
    [
        (lambda _: 0.1, "The learning rate is the same at every batch size: this experiment measures time"),
        (lambda batch: 0.02 * math.sqrt(batch / 256), "The learning rate was scaled with the batch, from 0.01 at"),
        (lambda _: None, "note: This experiment measures time, not accuracy."),
    ],
)
def test_the_note_on_the_learning_rate_is_that_of_the_runs(
    tmp_path: Path, lr: Callable[[int], float | None], note: str
) -> None:
    shown = " ".join(printed(read_scaling(write_scaling(tmp_path / "e", repeats=1, lr=lr)), 200).split())
    assert note in shown
    assert shown.count("this experiment measures time") + shown.count("This experiment measures time") == 1


def test_failures_are_named(tmp_path: Path) -> None:
    failures = {"ddp on 4 of 4, batch 256": "a [bold]rank[/] broke"}
    text = printed(read_scaling(write_scaling(tmp_path / "e", failures=failures)))
    assert "ddp on 4 of 4, batch 256 failed: a [bold]rank[/] broke" in text


def test_json_has_every_point(found: Scaling) -> None:
    content = json.loads(json.dumps(to_json(found), allow_nan=False))
    points = content["modes"]["strong"]["points"]
    assert [(p["strategy"], p["ranks"]) for p in points][:4] == [("single", 1), ("ddp", 1), ("ddp", 2), ("ddp", 4)]
    four = points[3]
    assert four["over_single"]["efficiency"]["value"] == pytest.approx(four["over_single"]["speed_up"]["value"] / 4)
    assert sum(four["split_s"].values()) == pytest.approx(four["split"]["mean"]["step_s"])
    assert content["modes"]["strong"]["best"] == "ddp on 4 of 4, batch 256"


def test_csv_has_plain_numbers(found: Scaling, tmp_path: Path) -> None:
    file, *others = write_scaling_tables(found, tmp_path)
    assert [other.name for other in others] == ["bytes_by_rank.csv", "payload.csv"]
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert len(rows) == 2 * 7
    assert float(rows[3]["speed_up_over_single"]) == pytest.approx(2.72, abs=0.01)
    assert rows[0]["speed_up_over_single"] == ""
    for figure in ("step_s", "epoch_s", "speed_up_over_single", "efficiency_over_one_rank", "compute_share"):
        low, value, high = (float(rows[3][f"{figure}{end}"]) for end in ("_low", "", "_high"))
        assert low <= value <= high, figure


def test_the_live_display_prints_the_plan_with_its_batches(found: Scaling) -> None:
    file = io.StringIO()
    display = ScalingLiveTable(Console(file=file, width=400))
    design = scale_design(
        batch_per_rank=64,
        repeats=3,
        shapes=[ScaleShape(hosts=hosts, ranks_per_host=1) for hosts in (1, 2, 4)],
        machines=[0, 0, 0, 0],
        hosts=4,
    )
    display.plan(design, [], RunConfig(steps=20))
    display.refresh(found.comparison, 3)
    assert file.getvalue().splitlines() == [
        "cnn on digits: single, ddp · strong (global batch 256) and weak (batch 64 per rank) scaling · "
        "1, 2 and 4 ranks × 1 thread · 20 steps × 3 repeats",
        "4 ranks share 2 cores: they take turns, so no speed-up will be claimed where ranks share cores",
        "after 3 repeats: 12 points measured",
    ]
