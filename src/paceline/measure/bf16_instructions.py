"""Whether this processor has instructions for bf16. Imports no torch."""

from __future__ import annotations

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names in `/proc/cpuinfo`: AVX-512 BF16 and AMX of x86, and the dot products of ARM.

torch also computes in bf16 on processors without any of these, but converts every number to float32 and back, which is
slower than float32.
"""


def has_bf16_instructions() -> bool:
    """Return whether the processor multiplies bf16 numbers itself; False where the system does not list its features.

    All cores of a machine are taken to be alike.
    """
    try:
        text = CPU_INFO.read_text()
    except OSError:
        return False
    listed = [line.partition(":")[2] for line in text.splitlines() if line.lower().startswith(("flags", "features"))]
    return any(not BF16_FLAGS.isdisjoint(flags.split()) for flags in listed[:1])
