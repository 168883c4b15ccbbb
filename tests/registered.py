"""Strategies for tests, from the registry: a new strategy is tested everywhere as soon as it is registered."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from paceline.plans.schedule import AllReduceAlgorithm
from paceline.strategies.base.abilities import UsesAllGpus
from paceline.strategies.base.packed import Packed
from paceline.strategies.base.strategy import AfterBackward
from paceline.strategies.registry import ENTRIES, create

EXCHANGING = [name for name, entry in ENTRIES.items() if entry.role == "candidate" and not entry.one_process]
"""Strategies whose ranks exchange gradients."""
ON_CPUS = [name for name in ENTRIES if not isinstance(create(name), UsesAllGpus)]
"""Strategies that run without GPUs."""
LOSSLESS = [name for name in EXCHANGING if create(name).lossless]
"""Strategies that train with the mean gradient."""
_PLANS = {name: importlib.import_module(entry.plan.partition(":")[0]) for name, entry in ENTRIES.items()}
ALGORITHMS: dict[str, AllReduceAlgorithm] = {
    name: plan.ALGORITHM for name, plan in _PLANS.items() if hasattr(plan, "ALGORITHM")
}
"""Paceline's own all-reduces, of the strategies whose plan has one."""
assert len(ALGORITHMS) >= 2


def with_options(names: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """Return the strategies, with options for some of them, such as buckets that fit small models."""
    assert options.keys() <= set(names)
    return [f"{name}:{options[name]}" if name in options else name for name in names]


def in_turn(texts: Sequence[str], turn: int) -> list[Any]:
    """Return strategies as parameters of a test, of which the suite has one of each family; the soak has the others.

    The strategies of a family differ only in the exchange of a tensor, for example `ring` and `tree`, or in one option,
    for example two variants of `ddp`. `turn` chooses the one. Tests with different turns have different ones, so the
    suite has all of them. Whatever an exchange itself can do wrongly is tested with every strategy, not in turn.
    """
    now = one_of_each_family(texts, turn)
    return [pytest.param(text, marks=() if text in now else pytest.mark.soak) for text in texts]


def one_of_each_family(texts: Sequence[str], turn: int) -> list[str]:
    """Return one strategy of each family; `turn` chooses it."""
    families: dict[str, list[str]] = {}
    for number, text in enumerate(texts):
        families.setdefault(_family(text, texts[:number]), []).append(text)
    return [members[turn % len(members)] for members in families.values()]


def _family(text: str, before: Sequence[str]) -> str:
    """Return the name of a strategy's family, which is its own name if it is the only one."""
    name = text.partition(":")[0]
    if name in {other.partition(":")[0] for other in before}:
        return f"variants of {name}"
    (base, *_) = type(create(text)).__bases__
    return base.__name__ if base in (AfterBackward, Packed) else name
