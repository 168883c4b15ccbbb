"""Random bits that belong to a sample: a counter-based hash of (seed, epoch, sample index).

A generator hands out numbers in the order in which they are asked for, so what a sample gets would depend on its batch,
and thereby on the world size. A hash has no order and no state, and in 64-bit integers it is the same on every device.
The mixing function is splitmix64's (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_DRAW_BITS = 20


def sample_bits(indices: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Returns 64 random bits (int64) for each sample index; equal keys give equal bits anywhere."""
    key = _mix_int(_mix_int(seed + _GOLDEN) + epoch + _GOLDEN)
    return _mix(indices * _signed(_GOLDEN) + _signed(key))


def uniform(bits: Tensor, *, field: int, below: int) -> Tensor:
    """Returns whole numbers in [0, below) out of the `field`-th group of 20 bits (0 to 2), independent of the others."""
    draw = (bits >> (field * _DRAW_BITS)) & ((1 << _DRAW_BITS) - 1)
    return (draw * below) >> _DRAW_BITS


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(_MULTIPLIER_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MULTIPLIER_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts zeros in from the left; int64's own `>>` copies the sign."""
    return (x >> bits) & (_MASK64 >> bits)


def _mix_int(x: int) -> int:
    x &= _MASK64
    x = (x ^ (x >> 30)) * _MULTIPLIER_1 & _MASK64
    x = (x ^ (x >> 27)) * _MULTIPLIER_2 & _MASK64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the bits of the unsigned `x`: torch takes no scalar beyond 2^63."""
    return x - (1 << 64) if x >> 63 else x
