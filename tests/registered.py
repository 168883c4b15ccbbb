"""Strategies for tests, from the registry: a new strategy is tested everywhere as soon as it is registered."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from paceline.plans.schedule import AllReduceAlgorithm
from paceline.strategies.registry import ENTRIES, create

EXCHANGING = [name for name, entry in ENTRIES.items() if entry.role == "candidate"]
"""Strategies whose ranks exchange gradients."""
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
