"""Random number generators of a rank: Python's `random`, numpy's global generator, and torch's on every device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from paceline.records.checkpoint import RandomStateInfo

WORD = np.dtype("<u4")
"""Type of the words of Python's and numpy's generators in a checkpoint."""
MERSENNE_WORDS = 624
"""Words of the state of a Mersenne twister. numpy does not check the position in them."""


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


def random_state_info(device: torch.device | None = None) -> RandomStateInfo:
    """Return the present state of all generators for a checkpoint, with that of `device` if it is a GPU."""
    state = RandomState.current()
    _, words, gauss = state.python
    return RandomStateInfo(
        python=np.array(words, dtype=WORD).tobytes(),
        python_gauss=gauss,
        numpy_key=state.numpy["state"]["key"].astype(WORD).tobytes(),
        numpy_position=int(state.numpy["state"]["pos"]),
        numpy_gauss=float(state.numpy["gauss"]) if state.numpy["has_gauss"] else None,
        torch_cpu=state.torch_cpu.numpy().tobytes(),
        cuda=torch.cuda.get_rng_state(device).numpy().tobytes() if _is_cuda(device) else None,
    )


def restore_random_state(info: RandomStateInfo, device: torch.device | None = None) -> None:
    """Set all generators to a state of a checkpoint; raise ValueError if it does not fit the generators.

    The generator of a GPU stays as it is if the checkpoint has none.
    """
    try:
        key = np.frombuffer(info.numpy_key, dtype=WORD).astype(np.uint32)
        if key.size != MERSENNE_WORDS or info.numpy_position > MERSENNE_WORDS:
            raise ValueError("numpy's has another size")
        gauss = {"has_gauss": int(info.numpy_gauss is not None), "gauss": info.numpy_gauss or 0.0}
        RandomState(
            python=(random.getstate()[0], tuple(np.frombuffer(info.python, dtype=WORD).tolist()), info.python_gauss),
            numpy={"bit_generator": "MT19937", "state": {"key": key, "pos": info.numpy_position}, **gauss},
            torch_cpu=_bytes_tensor(info.torch_cpu),
        ).restore()
        if _is_cuda(device) and info.cuda is not None:
            torch.cuda.set_rng_state(_bytes_tensor(info.cuda), device)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"the states of random number generators do not fit: {error}") from None


def _is_cuda(device: torch.device | None) -> TypeGuard[torch.device]:
    return device is not None and device.type == "cuda"


def _bytes_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
