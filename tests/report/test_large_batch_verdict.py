"""Tests of the sentences on an experiment with large batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from large_batches_on_disk import NOISE_SCALE, read_large_batches, write_large_batches
from paceline.report.large_batch_verdict import (
    closing_sentences,
    headline,
    noise_sentences,
    remedy_notes,
    row_outcome,
    sentences,
    size_sentences,
)

CHANCE = (0.1, 0.1, 0.1, 0.1)
BEST = (0.5, 0.7, 0.85, 0.9)
AGAINST = "against 90.0% of the reference batch of 32"


def every(*names: str) -> list[tuple[str, int]]:
    """Return all runs of some candidates."""
    return [(name, repeat) for name in names for repeat in range(3)]


LARGE = ("320 plain", "320 linear", "320 warmup", "320 linear+warmup")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            f"Linear+warmup repairs a batch of 320: 89.0% test accuracy, {AGAINST}; plain training reaches 60.0%.",
        ),
        (
            {"diverged": every("320 plain")},
            f"Linear+warmup repairs a batch of 320: 89.0% test accuracy, {AGAINST}; plain training diverged.",
        ),
        (
            {"accuracies": {("linear", "warmup"): (0.4, 0.6, 0.7, 0.8)}},
            "Nothing repairs a batch of 320 fully: linear+warmup reaches the most, 80.0% test accuracy, "
            f"{AGAINST}; plain training reaches 60.0%.",
        ),
        ({"accuracies": {(): BEST}}, f"Nothing to repair at a batch of 320: 90.0% test accuracy, {AGAINST}."),
        (
            {"accuracies": {(): (0.7, 0.7, 0.8, 0.85), ("linear", "warmup"): CHANCE}},
            "No remedy helps at a batch of 320: plain training reaches the most, 85.0% test accuracy, " + AGAINST + ".",
        ),
        (
            {"tries_remedies": False},
            f"No remedy was tried at a batch of 320: plain training reaches 60.0% test accuracy, {AGAINST}.",
        ),
        ({"diverged": every(*LARGE)}, "Nothing trains at a batch of 320: all candidates have diverged."),
        (
            {"diverged": every("32 reference")},
            "No conclusion: the reference batch of 32 has diverged. Use a lower --lr.",
        ),
        (
            {"diverged": [("32 reference", 1)]},
            "Linear+warmup repairs a batch of 320: 89.0% test accuracy, against 89.5% of the reference batch of 32 "
            "(diverged in 1 of 3 runs); plain training reaches 60.0%.",
        ),
        (
            {"accuracies": {("reference",): CHANCE}},
            "No conclusion: the reference batch of 32 is at chance level.",
        ),
        (
            {"missing": ["320 linear+warmup"]},
            f"So far: nothing repairs a batch of 320 fully: linear reaches the most, 75.0% test accuracy, {AGAINST}; "
            "plain training reaches 60.0%.",
        ),
        ({"measured": 0}, "The reference has not been tested yet."),
        ({"failed": LARGE}, "No large batch has been trained yet."),
    ],
)
def test_the_headline_is_on_the_largest_batch(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert headline(read_large_batches(write_large_batches(tmp_path / "e", **changes))) == expected


def test_gains_are_grouped_by_what_is_clear(tmp_path: Path) -> None:
    changed = {("linear",): (0.1, 0.2, 0.3, 0.3), ("linear", "warmup"): (0.4, 0.6, 0.8, 0.89)}
    found = read_large_batches(write_large_batches(tmp_path / "e", accuracies=changed))
    assert list(size_sentences(found)) == [
        "Batch 320: plain training reaches 60.0%, 30.0 percentage points less than the reference; over it, in "
        "percentage points: linear+warmup +29.0; below it: linear −30.0; no clear difference: warmup.",
        "Batch 320, within linear+warmup: added to the others, in percentage points: linear +29.0, warmup +59.0.",
    ]


def test_one_seed_shows_all_differences_and_calls_none_certain(tmp_path: Path) -> None:
    found = read_large_batches(write_large_batches(tmp_path / "e", repeats=1))
    assert next(iter(size_sentences(found))) == (
        "Batch 320: plain training reaches 60.0%, 30.0 percentage points less than the reference; over it, in "
        "percentage points: linear +15.0, warmup 0.0, linear+warmup +29.0."
    )
    assert list(closing_sentences(found)) == [
        "Fewer than 3 seeds give no interval, so no difference here is certain. Use --seeds 3."
    ]


def test_without_plain_training_remedies_have_their_own_accuracies(tmp_path: Path) -> None:
    diverged = [*every("320 plain"), ("320 linear", 0)]
    found = read_large_batches(write_large_batches(tmp_path / "e", diverged=diverged))
    assert next(iter(size_sentences(found))) == (
        "Batch 320: plain training diverged; reached with remedies: linear 75.0% test accuracy, warmup 60.0% test "
        "accuracy, linear+warmup 89.0% test accuracy; linear diverged in 1 of 3 runs."
    )


def test_more_seeds_are_offered_where_no_difference_is_clear(tmp_path: Path) -> None:
    path = write_large_batches(tmp_path / "e")
    assert list(closing_sentences(read_large_batches(path))) == [
        "Where no difference is clear, more seeds may show one: the same command with --seeds 6 and --out "
        f"{path} goes on."
    ]
    clear = {("warmup",): (0.4, 0.5, 0.6, 0.7)}
    assert list(closing_sentences(read_large_batches(write_large_batches(tmp_path / "f", accuracies=clear)))) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            "Batch 320: predicted to need 1.90× the epochs of the reference, so 71.6% at equal epochs; the best of it "
            "is 89.0% test accuracy, 17.4 percentage points more than predicted.",
        ),
        (
            {"accuracies": {("linear", "warmup"): (0.3, 0.5, 0.6, 0.72), ("linear",): CHANCE}},
            "Batch 320: predicted to need 1.90× the epochs of the reference, so 71.6% at equal epochs; the best of it "
            "is 72.0% test accuracy, as predicted.",
        ),
        (
            {"noise_scale": 8.0},
            "Batch 320: predicted to need 8.20× the epochs of the reference; the best of it is 89.0% test accuracy.",
        ),
    ],
)
def test_the_prediction_of_the_noise_scale_is_compared_with_the_best(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    first, *others = noise_sentences(read_large_batches(write_large_batches(tmp_path / "e", **changes)))
    value = f"{changes.get('noise_scale', NOISE_SCALE):.0f}"
    assert first.startswith(f"The gradient noise scale of the reference is {value} ({value}–{value}) samples: ")
    assert others == [expected]


def test_a_noise_scale_that_is_not_known_says_why(tmp_path: Path) -> None:
    assert list(noise_sentences(read_large_batches(write_large_batches(tmp_path / "e", noise_scale=None)))) == [
        "The gradient noise scale of the reference is not known: its mean gradient is smaller than its noise."
    ]
    diverged = write_large_batches(tmp_path / "f", noise_scale=None, diverged=every("32 reference"))
    assert list(noise_sentences(read_large_batches(diverged))) == []


def test_remedies_are_described_and_rows_have_their_outcome(tmp_path: Path) -> None:
    path = write_large_batches(tmp_path / "e", failed=["320 warmup"], diverged=[("320 linear", 2)], interrupted=True)
    found = read_large_batches(path)
    assert remedy_notes(found) == [
        ("linear", "learning rate × batch ÷ reference batch"),
        ("warmup", "the learning rate rises linearly in the first epochs (one epoch)"),
    ]
    outcomes = {row.row.candidate.name: row_outcome(row) for row in found.rows}
    assert outcomes == {
        "32 reference": "",
        "320 plain": "",
        "320 linear": "diverged in 1 of 3 runs",
        "320 warmup": "failed",
        "320 linear+warmup": "",
    }
    assert sentences(found)[-1].startswith("This experiment was interrupted")
