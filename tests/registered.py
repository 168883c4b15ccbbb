"""Strategies for tests, from the registry: a new strategy is tested everywhere as soon as it is registered."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import get_type_hints

from paceline.plans.schedule import MakeSchedule, Schedule
from paceline.strategies.registry import ENTRIES, create

EXCHANGING = [name for name, entry in ENTRIES.items() if entry.role == "candidate"]
"""Strategies whose ranks exchange gradients."""
LOSSLESS = [name for name in EXCHANGING if create(name).lossless]
"""Strategies that train with the mean gradient."""


def _schedules() -> Iterator[tuple[str, MakeSchedule]]:
    for name, entry in ENTRIES.items():
        module = importlib.import_module(entry.plan.partition(":")[0])
        schedule = getattr(module, "schedule", None)
        if schedule is not None and get_type_hints(schedule).get("return") is Schedule:
            yield name, schedule


SCHEDULES = dict(_schedules())
"""Schedules of Paceline's own all-reduces, of the strategies whose plan has one."""


def with_options(names: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """Return the strategies, with options for some of them, such as buckets that fit small models."""
    assert options.keys() <= set(names)
    return [f"{name}:{options[name]}" if name in options else name for name in names]
