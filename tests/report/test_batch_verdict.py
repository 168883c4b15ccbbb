"""Verdict of an experiment over batch sizes: the fastest size, its limits, its price, and the next command."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from batch_on_disk import STEP_S, TEST_ACCURACY, RunEnds, read_batch_sizes, write_batch_sizes
from paceline.analysis.batch.points import BatchSizes
from paceline.report.batch_verdict import headline_sentence, next_command, sentences
from paceline.report.page.batch import batch_plots, render_batch_sizes
from paceline.report.tables.batch import write_batch_tables
from paceline.report.terminal.batch import print_batch_sizes, to_json


def printed(found: BatchSizes) -> str:
    stream = io.StringIO()
    print_batch_sizes(found, Console(file=stream, width=200, color_system=None))
    return stream.getvalue()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> BatchSizes:
    """Three sizes on one rank and on two; the largest runs out of memory on one rank."""
    path = tmp_path_factory.mktemp("batch") / "e"
    return read_batch_sizes(write_batch_sizes(path, (64, 128, 160), out_of_memory=["single on 1, batch 160"]))


def test_the_verdict_names_sizes_limits_and_prices(found: BatchSizes) -> None:
    assert sentences(found) == [
        "Batch 160 on 2 ranks × 1 thread (ddp) trains fastest: 2,000 samples per second, an epoch in 320.00 ms.",
        "single on 1 rank: batch 128 trains fastest, 800 samples per second, 1.25× (1.25–1.25) as fast as batch 64; it "
        "is the largest that was measured.",
        "single on 1 rank: memory limits the batch: 160 ran out of memory, after 400.00 MB on a rank at batch 128.",
        "single on 1 rank: at batch 128 computing takes 98% of its step; its ranks keep 1.5 cores busy (75% of the "
        "usable ones); the model uses 40.0% of the peak.",
        "single on 1 rank: at equal epochs, batch 128 reaches a test accuracy of 90.0%, batch 64 95.0%: the speed "
        "costs 5.0 percentage points (2.0–8.0).",
        "single on 1 rank: when the first run of all ended (after 960.00 ms), batch 128 had the highest training "
        "accuracy, 25.0%.",
        "ddp on 2 ranks: batch 160 trains fastest, 2,000 samples per second, 1.56× (1.56–1.56) as fast as batch 128; "
        "it is the largest that was measured.",
        "ddp on 2 ranks: at batch 160 computing takes 79% of its step; its ranks keep 1.9 cores busy (95% of the "
        "usable ones), so the processor is the limit; the model uses 100.0% of the peak.",
        "ddp on 2 ranks: when the first run of all ended (after 960.00 ms), batch 160 had the highest training "
        "accuracy, 68.8%.",
    ]


def test_a_price_that_is_not_the_difference_of_the_medians_says_so(tmp_path: Path) -> None:
    path = write_batch_sizes(tmp_path / "e", ranks=(1,))
    for number, accuracies in enumerate([(0.90, 0.95, 0.99), (0.80, 0.86, 0.88)]):
        for repeat, accuracy in enumerate(accuracies):
            file = path / f"repeat-{repeat + 1}" / str(number + 1) / "summary.json"
            content = json.loads(file.read_text())
            content["test"]["accuracy"] = accuracy
            file.write_text(json.dumps(content))
    verdict = sentences(read_batch_sizes(path))
    assert verdict[0].endswith(
        "is 10.0 percentage points below that of batch 64 at equal epochs, paired by seed; the medians differ by 9.0."
    )
    (price,) = [own for own in verdict if "the speed costs" in own]
    assert "batch 128 reaches a test accuracy of 86.0%, batch 64 95.0%: the speed costs 10.0 percentage" in price
    assert price.endswith("), paired by seed; the medians differ by 9.0.")


def test_a_ratio_that_contradicts_the_samples_per_second_has_a_note(tmp_path: Path) -> None:
    times = {64: (4.00, 4.06, 8.0), 128: (8.18, 7.0, 14.0)}  # Per sample as in the test of `contradicts_medians`.
    step_s = {("single", batch, repeat): own[repeat] for batch, own in times.items() for repeat in range(3)}
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", ranks=(1,), step_s=step_s))
    note = "single on 1, batch 128: the ratio to single on 1, batch 64 and the median times contradict each other"
    assert [own for own in found.warnings if note in own]
    assert note in printed(found)


def test_the_next_command_trains_with_the_size_that_pays(found: BatchSizes, tmp_path: Path) -> None:
    assert next_command(found) == "paceline train --epochs 2 --ranks 2 --strategy ddp --batch 160"
    nothing = read_batch_sizes(write_batch_sizes(tmp_path / "e", repeats=0))
    assert next_command(nothing) is None
    assert sentences(nothing)[0] == "No step was timed."


def test_a_fast_size_that_costs_accuracy_is_not_suggested(tmp_path: Path) -> None:
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e"))
    assert sentences(found)[0] == (
        "Batch 128 on 2 ranks × 1 thread (ddp) trains fastest: 1,280 samples per second, an epoch in 500.00 ms; its "
        "test accuracy is 5.0 percentage points below that of batch 64 at equal epochs."
    )
    assert next_command(found) == "paceline train --epochs 2 --ranks 2 --strategy ddp --batch 64"
    twice = read_batch_sizes(write_batch_sizes(tmp_path / "twice", repeats=2))
    assert any("too few repeats to tell whether that is more than chance" in own for own in sentences(twice))
    assert next_command(twice) == "paceline train --epochs 2 --ranks 2 --strategy ddp --batch 128"


def test_a_size_that_is_nearly_as_fast_is_named(tmp_path: Path) -> None:
    step_s = {("ddp", 32): 0.016, ("ddp", 160): 0.078}
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", (32, 160), (2,), trains=False, step_s=step_s))
    assert sentences(found)[1] == (
        "ddp on 2 ranks: batch 160 trains fastest, 2,051 samples per second; batch 32 is within 5% of that, so larger "
        "ones no longer pay."
    )
    assert next_command(found) == "paceline train --ranks 2 --strategy ddp --batch 32"


def test_the_terminal_names_failures_and_leaves_out_empty_tables(tmp_path: Path) -> None:
    path = write_batch_sizes(tmp_path / "e", trains=False, out_of_memory=["ddp on 2, batch 128"], interrupted=True)
    text = printed(read_batch_sizes(path))
    assert "128 out of memory" in text
    assert "Batch 128 on 2 ranks (ddp) ran out of memory: rank 0 ran out of memory: MemoryError." in text
    assert "Loss and accuracy" not in text
    assert "epoch (extrapolated)" in text
    assert "This experiment was interrupted" in text


def test_the_page_has_a_plot_of_each(found: BatchSizes) -> None:
    assert set(batch_plots(found)) >= {"time", "communication", "split", "resources", "training", "losses"}
    page = render_batch_sizes(found)
    assert "<h2>Loss and accuracy</h2>" in page
    assert '<span class="tag bad">out of memory</span>' in page
    assert "paceline train --epochs 2 --ranks 2 --strategy ddp --batch 160" in page


def test_a_page_without_runs(tmp_path: Path) -> None:
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", repeats=0, interrupted=True))
    assert "Nothing was measured yet" in render_batch_sizes(found)
    assert to_json(found)["best"] is None


def test_a_killed_rank_is_only_probably_out_of_memory(tmp_path: Path) -> None:
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", (64, 128, 160), killed=["single on 1, batch 160"]))
    assert (
        "single on 1 rank: memory probably limits the batch: a rank was killed at 160, after 400.00 MB on a rank at "
        "batch 128." in sentences(found)
    )
    text = printed(found)
    assert "160 killed" in text
    assert "Batch 160 on 1 rank (single) was killed: rank 0 was killed by SIGKILL, probably because" in text
    assert '<span class="tag bad">killed</span>' in render_batch_sizes(found)
    assert to_json(found)["points"][2]["out_of_memory"] == "probably"


def test_a_faster_strategy_that_does_not_compute_the_same_stands_beside_the_headline(tmp_path: Path) -> None:
    accuracies = {("topk", 64): 0.90, ("topk", 128): 0.85}
    step_s = STEP_S | {("topk", 64): 0.07, ("topk", 128): 0.08}
    path = write_batch_sizes(tmp_path / "e", lossy=["topk"], step_s=step_s, test_accuracy=TEST_ACCURACY | accuracies)
    found = read_batch_sizes(path)
    headline, beside = sentences(found)[:2]
    assert headline.startswith(
        "Batch 128 on 2 ranks × 1 thread (ddp) is the fastest that computes the same as one process: "
    )
    assert beside.startswith("topk on 2, batch 128 is 1.25× as fast as ddp on 2, batch 128 (")
    assert "but does not compute the same: it does not train with the mean gradient." in beside
    assert "Its test accuracy is 6.0 percentage points lower than that of ddp on 2, batch 128 (" in beside
    assert "--strategy ddp" in str(next_command(found))
    assert to_json(found)["best"] == "ddp on 2, batch 128"
    assert [own["candidate"] for own in to_json(found)["alternatives"]] == ["topk on 2, batch 128"]


def test_tables_name_points_that_diverged(tmp_path: Path) -> None:
    ends = RunEnds(diverged=[("ddp on 2, batch 128", 0)])
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", ends=ends))
    assert "128 1 of 3 diverged" in printed(found)
    assert '<span class="tag bad">1 of 3 diverged</span>' in render_batch_sizes(found)


@pytest.mark.parametrize(
    ("length", "phrase", "title"),
    [
        ({"epochs": 2}, "at equal epochs", "Loss and accuracy, at equal epochs and at equal time"),
        ({"seconds": 10.0}, "at equal time", "Loss and accuracy at equal time"),
        ({"epochs": 2, "seconds": 10.0}, "at the end", "Loss and accuracy, at the end and at equal time"),
    ],
)
def test_accuracies_are_compared_at_the_length_of_the_runs(
    tmp_path: Path, length: dict[str, float], phrase: str, title: str
) -> None:
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", length=length))
    headline, *others = sentences(found)
    assert headline.endswith(f"its test accuracy is 5.0 percentage points below that of batch 64 {phrase}.")
    assert any(f"{phrase}, batch 128 reaches a test accuracy of 91.0%" in own for own in others)
    assert f"{title}\n" in printed(found)
    if "seconds" in length:
        shown = " ".join([*sentences(found), printed(found), render_batch_sizes(found)])
        assert "equal epochs" not in shown.lower()


def test_two_repeats_show_both_values_and_no_interval(tmp_path: Path) -> None:
    step_s = {("ddp", 64, 0): 0.08, ("ddp", 64, 1): 0.09, ("ddp", 128): 0.1}
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", ranks=(2,), repeats=2, step_s=step_s))
    assert any("1.70× (1.60× and 1.80×) as fast as batch 64" in own for own in sentences(found))
    assert sentences(found)[-1] == (
        "Two repeats give no interval; both values are shown, so no difference here is certain. "
        "Use --repeats 3 or more."
    )
    assert "±" not in printed(found)
    assert "95% interval</" not in render_batch_sizes(found).partition("<script")[0]
    third = read_batch_sizes(write_batch_sizes(tmp_path / "third", ranks=(2,), step_s=step_s))
    assert "± is half the width of the 95% interval." in printed(third)


def test_the_headline_says_where_the_next_size_is_not_measurably_slower(tmp_path: Path) -> None:
    times = (0.09, 0.11, 0.10)
    step_s = {("ddp", 128): 0.2} | {("ddp", 64, repeat): time for repeat, time in enumerate(times)}
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", ranks=(2,), trains=False, step_s=step_s))
    assert "trains fastest: " in sentences(found)[0]
    assert "; no measurable difference in speed from batch " in sentences(found)[0]
    several = read_batch_sizes(write_batch_sizes(tmp_path / "several", ranks=(2,), trains=False))
    assert "no measurable difference" not in sentences(several)[0]


def test_peak_learning_rates_are_shown_with_their_scaling(tmp_path: Path) -> None:
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", lrs={64: 0.05, 128: 0.0707}))
    assert [point["lr"] for point in to_json(found)["points"]] == [0.05, 0.0707, 0.05, 0.0707]
    assert "peak lr" in printed(found)
    assert "Peak learning rate" in render_batch_sizes(found)
    note = "The learning rate was scaled by sqrt, from 0.05 at batch 64 to 0.0707 at batch 128."
    assert note in found.warnings


def test_a_learning_rate_that_short_runs_do_not_reach_is_said(tmp_path: Path) -> None:
    path = write_batch_sizes(tmp_path / "e", lrs={64: 0.05, 128: 0.0707})
    for file in path.glob("repeat-*/*/events.jsonl"):
        is_large = int(file.parent.name) % 2 == 0  # Candidates alternate between the two sizes.
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if line["event"] == "log":
                line["lr"] = 0.01 if is_large else 0.05
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_batch_sizes(path)
    assert {(point["batch"], point["lr"]) for point in to_json(found)["points"]} == {(64, 0.05), (128, 0.01)}
    assert (
        "Runs are too short for their warm-up, so the learning rate reaches only 0.01 in place of 0.0707 at batch 128. "
        "Train for more epochs to compare accuracies."
    ) in found.warnings


def test_a_size_at_chance_level_is_not_recommended(tmp_path: Path) -> None:
    accuracies = {("single", 64): 0.9, ("single", 128): 0.1, ("ddp", 64): 0.9, ("ddp", 128): 0.1}
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", repeats=2, test_accuracy=accuracies))
    assert found.best is not None
    assert found.best.batch == 128
    assert "its test accuracy is at chance level" in headline_sentence(found)
    command = next_command(found)
    assert command is not None
    assert "--batch 64" in command


def test_runs_tested_while_they_train_are_compared_by_test_accuracy_at_equal_time(tmp_path: Path) -> None:
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", is_tested=True))
    when = "when the first run of all ended (after 1.50 s)"
    assert f"ddp on 2 ranks: {when}, batch 128 had the highest test accuracy, 70.0%." in sentences(found)
    assert "validation" in batch_plots(found)
    page = render_batch_sizes(found)
    assert "<h2>Test accuracy while training</h2>" in page
    assert "Test accuracy at equal time" in page
    curves = to_json(found)["evaluations"]["ddp on 2, batch 128"]
    assert [own["repeat"] for own in curves] == [0, 1, 2]
    assert [point["accuracy"] for point in curves[0]["points"]] == pytest.approx([0.2, 0.45, 0.575, 0.7])
    files = write_batch_tables(found, tmp_path / "csv")
    assert "evaluations.csv" in {file.name for file in files}


@pytest.mark.parametrize(
    ("noise_scale", "value", "prediction"),
    [
        (
            1000.0,
            "1,000 (1,000–1,000)",
            "1.06× the epochs and 0.66× the time at batch 128, so batch 128 is the fastest to it",
        ),
        (10.0, "10 (10–10)", "1.86× the epochs and 1.17× the time at batch 128, so no larger batch pays"),
    ],
)
def test_the_noise_scale_predicts_where_larger_batches_stop_paying(
    tmp_path: Path, noise_scale: float, value: str, prediction: str
) -> None:
    """Batch 128 trains 1.6 times as many samples per second as batch 64; (N + 128) ÷ (N + 64) are the epochs."""
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", ranks=(2,), noise_scale=noise_scale))
    assert (
        f"ddp on 2 ranks: the gradient noise scale at batch 64 is {value} samples. For the same loss, at learning "
        f"rates that suit each batch, it predicts {prediction}." in sentences(found)
    )
    assert "noise scale" in printed(found).partition("Loss and accuracy")[2].splitlines()[1], "beside the accuracy"
    assert 'aria-describedby="define-noise_scale"' in render_batch_sizes(found)
    assert "noise scale" not in " ".join(sentences(read_batch_sizes(write_batch_sizes(tmp_path / "none"))))
