"""Abilities: a strategy has one by its methods alone, whether it is registered or a user's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from paceline import AfterBackward
from paceline.strategies.base.abilities import (
    GivesTickets,
    LimitsRanks,
    ReportsMetrics,
    ServesParameters,
    SlowOnGpus,
    UpdatesInParts,
    UsesAllGpus,
)
from paceline.strategies.registry import ENTRIES, create

FEW = {
    LimitsRanks: {"parameter_server"},
    UsesAllGpus: {"data_parallel"},
    SlowOnGpus: {"shared_memory"},
    ServesParameters: {"parameter_server"},
    GivesTickets: {"parameter_server"},
    UpdatesInParts: {"priority"},
    ReportsMetrics: {"parameter_server"},
}


@pytest.mark.parametrize("ability", FEW, ids=lambda ability: ability.__name__)
def test_few_strategies_have_an_ability(ability: type) -> None:
    assert {name for name in ENTRIES if isinstance(create(name), ability)} == FEW[ability]


class Plain(AfterBackward):
    """Strategy of a user."""

    name = "plain"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Do nothing."""


class Counting(Plain):
    """Strategy with a figure of its own."""

    def metrics(self) -> dict[str, int]:
        """Return the figure."""
        return {"rounds": 3}


def test_a_method_is_all_that_an_ability_needs() -> None:
    assert not any(isinstance(Plain(), ability) for ability in FEW)
    assert isinstance(Counting(), ReportsMetrics)
