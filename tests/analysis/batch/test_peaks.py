"""Peaks of GPUs, by name and number format."""

from __future__ import annotations

import pytest

from paceline.analysis.batch.peaks import GPU_PEAKS, gpu_peak_flop_per_s


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H200", "fp32", 494.7e12),
        ("NVIDIA H200 NVL", "bf16", 835.5e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce GTX 1080", "fp32", None),
    ],
)
def test_the_peak_of_a_gpu(name: str, precision: str, peak: float | None) -> None:
    assert gpu_peak_flop_per_s(name, precision) == (None if peak is None else pytest.approx(peak))


def test_a_variant_comes_before_its_family() -> None:
    names = list(GPU_PEAKS)
    assert all(not later.startswith(name) for place, name in enumerate(names) for later in names[place + 1 :])
