"""A second state of the host's random number generators, which code that is called in every step uses for a moment."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from paceline.workloads.random_state import MERSENNE_WORDS, seeded


class SeparateRandomState:
    """State of Python's, numpy's and torch's generators for the blocks of `in_use`. Each goes on from the one before.

    After a block, the generators are as before it. Reading and writing numpy's state take 25 µs each. So its memory is
    exchanged instead, and its state is read only if something has drawn from it.
    """

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self._python = random.getstate()
            self._torch = torch.get_rng_state()
            state = np.random.get_state(legacy=False)
        self._own, self._outer = _NumpyState(np.random.MT19937()), _NumpyState(mtrand.get_bit_generator())
        self._own.bits.state = state

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the generators this state inside the `with` block."""
        python, torch_cpu = random.getstate(), torch.get_rng_state()
        self._outer.leave()
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        self._own.enter()
        try:
            yield
        finally:
            self._python, self._torch = random.getstate(), torch.get_rng_state()
            self._own.leave()
            random.setstate(python)
            torch.set_rng_state(torch_cpu)
            self._outer.enter()


class _NumpyState:
    """State of numpy's global generator: a bit generator, and the second of two normal numbers drawn at once."""

    def __init__(self, bits: Any) -> None:
        self.bits = bits
        self._second: float | None = None
        self._words = b""
        """Words of the bit generator when `_second` was found to be None; empty if it is unknown."""

    def leave(self) -> None:
        """Keep the state of numpy's generator."""
        self.bits = mtrand.get_bit_generator()
        words = _words_of(self.bits)
        if words and words == self._words:
            return  # Nothing was drawn, and there was no second number left that could be used without drawing.
        state: Any = np.random.get_state(legacy=False)
        self._second = state["gauss"] if state["has_gauss"] else None
        self._words = words if self._second is None else b""

    def enter(self) -> None:
        """Give numpy's generator this state."""
        mtrand.set_bit_generator(self.bits)  # It drops the second number.
        if self._second is not None:
            state: Any = np.random.get_state(legacy=False)
            np.random.set_state(state | {"has_gauss": 1, "gauss": self._second})


def _words_of(bits: Any) -> bytes:
    """Return the memory of numpy's usual bit generator, its words and a position; empty for another one."""
    if not isinstance(bits, np.random.MT19937):
        return b""
    return ctypes.string_at(bits.ctypes.state_address, 4 * (MERSENNE_WORDS + 1))
