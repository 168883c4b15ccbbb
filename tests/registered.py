"""Strategies for tests, from the registry: a new strategy is tested everywhere as soon as it is registered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.strategies.registry import ENTRIES, create

EXCHANGING = [name for name, entry in ENTRIES.items() if entry.role == "candidate"]
"""Strategies whose ranks exchange gradients."""
LOSSLESS = [name for name in EXCHANGING if create(name).lossless]
"""Strategies that train with the mean gradient."""


def with_options(names: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """Return the strategies, with options for some of them, such as buckets that fit small models."""
    assert options.keys() <= set(names)
    return [f"{name}:{options[name]}" if name in options else name for name in names]
