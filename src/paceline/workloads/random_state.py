"""Random number generators of a rank: Python's `random`, numpy's global generator, and torch's on every device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seed all three generators; numpy's takes 32 bits only."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # It also seeds the generators of all GPUs.


@contextmanager
def kept_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore all generators after the `with` block, with that of `device` if it is a GPU."""
    state = RandomState.current()
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        try:
            yield
        finally:
            state.restore()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of the host inside the `with` block, and restore them after it."""
    with kept_random_state():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())  # `torch.manual_seed` would seed GPUs too.
        yield


@dataclass(frozen=True)
class RandomState:
    """State of the generators of the host."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch_cpu: Tensor

    @classmethod
    def current(cls) -> RandomState:
        """Return the present state."""
        return cls(random.getstate(), dict(np.random.get_state(legacy=False)), torch.get_rng_state())

    def restore(self) -> None:
        """Set the generators to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
