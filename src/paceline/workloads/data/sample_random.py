"""Random numbers per sample: a counter-based hash of (seed, epoch, sample index).

A generator returns numbers in the order of its calls, so a sample's number would depend on its batch, and on the world
size. A hash has no order and no state, and in 64-bit integers it is the same on every device. The mixing function is
that of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_DRAW_BITS = 31


def draw_below(below: int, indices: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Return one whole number in [0, below) for each sample index (int64); `below` must be small compared with 2^31."""
    key = mix(mix(seed + _GOLDEN) + epoch + _GOLDEN)
    bits = indices * _signed(_GOLDEN)
    bits += _signed(key)
    bits ^= _shift_right(bits, 30)
    bits *= _signed(_MULTIPLIER_1)
    bits ^= _shift_right(bits, 27)
    bits *= _signed(_MULTIPLIER_2)
    # splitmix64 ends with bits ^= bits >> 31, which does not change the upper 31 bits, the only ones used here.
    return _shift_right(bits, 64 - _DRAW_BITS).mul_(below).bitwise_right_shift_(_DRAW_BITS)


def mix(x: int) -> int:
    """Mix one whole number, of any size and sign, into 64 bits, as splitmix64 does."""
    x &= _MASK64
    x = (x ^ (x >> 30)) * _MULTIPLIER_1 & _MASK64
    x = (x ^ (x >> 27)) * _MULTIPLIER_2 & _MASK64
    return x ^ (x >> 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; `>>` on int64 would copy the sign."""
    return (x >> bits).bitwise_and_(_MASK64 >> bits)


def _signed(x: int) -> int:
    """Return the int64 with the bits of the unsigned `x`, since torch accepts no scalar above 2^63."""
    return x - (1 << 64) if x >> 63 else x
