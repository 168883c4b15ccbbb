"""Candidates of an experiment with large batches: settings of each remedy, accumulation, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commands import USER_CODE
from paceline.config import LargeBatchConfig, RunConfig
from paceline.config.recipe import Recipe
from paceline.errors import UsageError
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.large_batches.candidates import LargeBatchCandidates, make_large_batch_candidates
from paceline.experiments.large_batches.trained_workload import (
    TrainedWorkload,
    examine_workload,
    with_plain_recipe,
)
from paceline.launch.launcher_process import Shape

BASE = RunConfig(workload="resnet18", epochs=8)
WORKLOAD = TrainedWorkload(
    Recipe(lr=0.1, reference_batch=256, scale_lr="linear", warmup_epochs=3, weight_decay=5e-4, zero_gamma=True),
    samples=50_000,
    has_residual_norms=True,
)


def made(
    config: LargeBatchConfig, workload: TrainedWorkload = WORKLOAD, base: RunConfig = BASE, ranks: int = 2
) -> LargeBatchCandidates:
    return make_large_batch_candidates(base, config, workload, Shape(1, ranks), 1024)


def one_of(found: LargeBatchCandidates, name: str) -> CandidateConfig:
    return next(one for one in found.candidate_configs if one.candidate.name == name)


def test_the_reference_is_first_and_has_no_remedy() -> None:
    found = made(LargeBatchConfig(reference=128, large="1024,8192"))
    own = found.reference
    assert own.candidate.name == "128 reference"
    assert own.candidate.settings == {"batch": 128}
    assert (own.config.batch, own.config.lr, own.config.scale_lr) == (128, 0.05, None)
    assert (own.config.warmup_epochs, own.config.zero_gamma, own.config.noise_scale) == (0.0, False, "auto")
    assert found.sizes == [1024, 8192]
    assert len(found.candidate_configs) == 1 + 2 * 7
    assert {one.candidate.variant and one.candidate.variant.batch for one in found.candidate_configs} == {
        128,
        1024,
        8192,
    }


def test_plain_training_differs_in_the_batch_alone() -> None:
    found = made(LargeBatchConfig(large="1024"))
    assert one_of(found, "1024 plain").candidate.settings == {"batch": 1024}
    assert one_of(found, "1024 plain").config.lr == found.reference.config.lr


@pytest.mark.parametrize(
    ("remedy", "expected"),
    [
        ("linear", {"scale_lr": "linear", "reference_batch": 128}),
        ("sqrt", {"scale_lr": "sqrt", "reference_batch": 128}),
        ("warmup", {"warmup_epochs": 2.0}),
        ("zero-gamma", {"zero_gamma": True}),
        (
            "lars",
            {"optimizer": "lars", "lr": 2.0, "scale_lr": "sqrt", "reference_batch": 256, "weight_decay": 5e-4},
        ),
        ("linear+warmup", {"scale_lr": "linear", "reference_batch": 128, "warmup_epochs": 2.0}),
    ],
)
def test_a_remedy_changes_its_own_settings_alone(remedy: str, expected: dict[str, Any]) -> None:
    found = made(LargeBatchConfig(large="1024", remedies=remedy))
    assert one_of(found, f"1024 {remedy}").candidate.settings == {"batch": 1024} | expected


def test_the_learning_rate_of_a_remedy_is_scaled_from_the_reference() -> None:
    own = one_of(made(LargeBatchConfig(large="1024", remedies="linear")), "1024 linear").config
    assert own.lr is not None
    scaled = Recipe(lr=own.lr, scale_lr=own.scale_lr or "none", reference_batch=own.reference_batch or 1)
    assert scaled.peak_lr(own.batch) == pytest.approx(0.05 * 1024 / 128)


@pytest.mark.parametrize(
    ("ranks", "passes"), [(1, {128: 2, 1024: 1, 8192: 8, 9000: 9}), (2, {128: 1, 1024: 1, 8192: 4, 9000: 5})]
)
def test_a_share_larger_than_a_micro_batch_is_accumulated(ranks: int, passes: dict[int, int]) -> None:
    """On one rank the reference has two passes, so that two gradients can be compared."""
    base = BASE if ranks > 1 else replace(BASE, strategy="single")
    found = made(LargeBatchConfig(large="1024,8192,9000", remedies="plain"), base=base, ranks=ranks)
    assert {one.config.batch: one.config.accumulate for one in found.candidate_configs} == passes


def test_without_a_noise_scale_one_rank_accumulates_nothing() -> None:
    base = replace(BASE, strategy="single")
    found = made(LargeBatchConfig(large="1024", remedies="plain", noise_scale="off"), base=base, ranks=1)
    assert found.reference.config.accumulate == 1
    assert found.reference.config.noise_scale == "off"


def test_batches_larger_than_the_data_are_left_out() -> None:
    small = TrainedWorkload(WORKLOAD.recipe, samples=5000, has_residual_norms=True)
    assert made(LargeBatchConfig(reference=128), small).sizes == [1024]
    assert made(LargeBatchConfig(reference=128), small).left_out == [], "nobody asked for 64 times the reference"
    named = made(LargeBatchConfig(large="1024,8192,16384"), small)
    assert named.sizes == [1024]
    assert named.left_out == ["Batches of 8,192 and 16,384 are not tried: the training data has 5,000 samples."]
    with pytest.raises(UsageError, match="the training data has 5,000 samples, fewer than a batch of 8,192"):
        made(LargeBatchConfig(large="8192"), small)
    unknown = TrainedWorkload(WORKLOAD.recipe, samples=None, has_residual_norms=True)
    assert made(LargeBatchConfig(large="1000000"), unknown).sizes == [1_000_000]


def test_remedies_without_effect_are_left_out_and_refused_if_named() -> None:
    without = TrainedWorkload(Recipe(optimizer="lars", lr=2.0), samples=50_000, has_residual_norms=False)
    found = made(LargeBatchConfig(large="1024"), without)
    assert [one.candidate.name for one in found.candidate_configs][1:] == [
        "1024 plain",
        "1024 linear",
        "1024 warmup",
        "1024 linear+warmup",
    ]
    assert found.left_out == [
        "zero-gamma is not tried: the model has no residual block that ends in a BatchNorm.",
        "lars is not tried: the recipe has that optimiser already.",
    ]
    for remedy in ("zero-gamma", "lars", "linear+zero-gamma"):
        with pytest.raises(UsageError, match="has no effect"):
            made(LargeBatchConfig(large="1024", remedies=remedy), without)


def test_a_built_in_model_takes_the_classic_recipe_unless_another_is_named() -> None:
    assert with_plain_recipe(RunConfig()).recipe == "classic"
    assert with_plain_recipe(RunConfig(recipe="default")).recipe == "default"
    assert with_plain_recipe(RunConfig(workload="my_module:make")).recipe == ""


def test_facts_of_a_workload_are_those_of_its_model_and_data() -> None:
    found = examine_workload(with_plain_recipe(RunConfig(workload="cnn", data="digits", lr=0.003)))
    assert (found.samples, found.has_residual_norms, found.recipe.lr) == (1437, False, 0.003)
    assert examine_workload(RunConfig(workload="resnet18", data="digits")).has_residual_norms


@pytest.mark.parametrize(
    ("workload", "error"),
    [
        ("user_workloads:scheduled", "has its own optimizer, which remedies cannot change"),
        ("user_workloads:slow_stream", "is an iterable of batches, so its batch cannot be changed"),
    ],
)
def test_a_workload_that_remedies_cannot_change_is_refused(
    monkeypatch: pytest.MonkeyPatch, workload: str, error: str
) -> None:
    monkeypatch.chdir(USER_CODE)
    monkeypatch.syspath_prepend(USER_CODE)
    with pytest.raises(UsageError, match=error):
        examine_workload(RunConfig(workload=workload))
