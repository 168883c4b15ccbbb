"""Tests of the settings of `paceline large-batch`: which combinations of remedies are tried, and what is refused."""

from __future__ import annotations

import pytest

from paceline.config import LargeBatchConfig
from paceline.config.large_batch import DEFAULT_REMEDIES, Variant, variant_name
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["plain", "linear", "warmup", "zero-gamma", "lars", "linear+warmup+zero-gamma", "warmup+zero-gamma+lars"]),
        ({"remedies": "lars"}, ["plain", "lars"]),
        ({"remedies": "plain"}, ["plain"]),
        ({"remedies": "warmup,linear,all"}, ["plain", "linear", "warmup", "linear+warmup"]),
        ({"remedies": "zero-gamma+linear,sqrt"}, ["plain", "sqrt", "linear+zero-gamma"]),
        ({"remedies": "zero-gamma,warmup,all"}, ["plain", "warmup", "zero-gamma", "warmup+zero-gamma"]),
        ({"remedies": "linear,linear"}, ["plain", "linear"]),
        (
            {"remedies": "linear+warmup+zero-gamma", "leave_one_out": True},
            ["plain", "linear+warmup", "linear+zero-gamma", "warmup+zero-gamma", "linear+warmup+zero-gamma"],
        ),
    ],
)
def test_variants_are_those_named_with_plain_training_first(settings: dict[str, object], expected: list[str]) -> None:
    config = LargeBatchConfig(**settings)  # type: ignore[arg-type]
    assert [variant_name(variant) for variant in config.variants(DEFAULT_REMEDIES)] == expected


def test_remedies_without_effect_are_left_out_of_the_default_ones() -> None:
    found: tuple[Variant, ...] = LargeBatchConfig().variants(("linear", "warmup"))
    assert found == ((), ("linear",), ("warmup",), ("linear", "warmup"))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"remedies": "linaer"}, "there is no remedy 'linaer'"),
        ({"remedies": "linear+sqrt"}, "--remedies linear\\+sqrt combines linear and sqrt, which both determine"),
        ({"remedies": "warmup+lars+linear"}, "combines linear and lars"),
        ({"large": "128"}, "--large names 128, which is not more than the reference batch of 128"),
        ({"large": "512,x"}, "--large '512,x' is not a list of positive numbers"),
        ({"reference": 0}, "--reference"),
        ({"seeds": 0}, "--seeds"),
        ({"micro_batch": -1}, "--micro-batch"),
        ({"warmup_epochs": -1.0}, "--warmup-epochs"),
    ],
)
def test_settings_that_make_no_experiment_are_refused(settings: dict[str, object], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        LargeBatchConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "epochs", "expected"), [(None, 90, 5.0), (None, 8, 2.0), (0.5, 8, 0.5), (9.0, 8, 9.0)]
)
def test_warm_up_takes_five_epochs_but_at_most_a_quarter_of_the_run(
    given: float | None, epochs: int, expected: float
) -> None:
    assert LargeBatchConfig(warmup_epochs=given).warmup_length(epochs) == expected


def test_sizes_are_ascending() -> None:
    assert LargeBatchConfig(large="8192,1024").sizes == (1024, 8192)
    assert LargeBatchConfig().sizes == ()
