"""Settings of a launch that need others."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import LaunchConfig
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"min_hosts": 2, "ranks_per_host": 1, "hosts": 3}, "--min-hosts 2 was given without --max-restarts."),
        ({"min_hosts": 2, "max_restarts": 1, "hosts": 3}, "--min-hosts 2 was given without --ranks-per-host."),
        ({"min_hosts": 0}, "--min-hosts is 0."),
        ({"max_restarts": -1}, "--max-restarts is -1."),
        ({"grace": 0.0}, "--grace is 0.0."),
    ],
)
def test_settings_of_restarts_that_are_refused(options: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError) as refused:
        LaunchConfig(**options)
    assert refused.value.message == found
    assert refused.value.hint
