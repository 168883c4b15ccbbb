"""Parameter groups of torch's optimisers: keys that belong to the parameters, and keys that are settings."""

from __future__ import annotations

PER_PARAMETER_KEYS = ("params", "param_names")
"""Keys of a parameter group that have one entry per parameter; all others are settings."""
