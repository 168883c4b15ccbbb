"""Tests of the description of a model in the record."""

from __future__ import annotations

from torch import nn

from paceline.training.topology import describe_model


def test_layers_whose_result_depends_on_the_sharding_are_counted() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Sequential(nn.AlphaDropout(0.1), nn.Dropout2d(0.2))
    )
    described = describe_model(model)
    assert (described["batch_norm_layers"], described["random_layers"]) == (1, 3)


def test_dropout_that_drops_nothing_is_not_random() -> None:
    assert describe_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))["random_layers"] == 0
