"""All-reduce algorithms of the strategies in the registry, for tests that run for each of them."""

from __future__ import annotations

import importlib

from paceline.plans.schedule import AllReduceAlgorithm
from paceline.strategies.registry import ENTRIES

_PLANS = {name: importlib.import_module(entry.plan.partition(":")[0]) for name, entry in ENTRIES.items()}
ALGORITHMS: dict[str, AllReduceAlgorithm] = {
    name: plan.ALGORITHM for name, plan in _PLANS.items() if hasattr(plan, "ALGORITHM")
}
assert len(ALGORITHMS) >= 2
