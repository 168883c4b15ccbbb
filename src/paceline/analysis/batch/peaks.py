"""Peak FLOP per second of the processors of a run, which model FLOP utilisation (MFU) is relative to."""

from __future__ import annotations

from paceline.analysis.scaling.machines import cores_per_rank, hosts_of
from paceline.records import RunRecord
from paceline.records.experiment.design import BatchDesign

TERA = 1e12
GPU_PEAKS: dict[str, dict[str, float]] = {
    "H200 NVL": {"bf16": 835.5, "fp16": 835.5, "fp32": 417.5, "fp64": 60.0},
    "H200": {"bf16": 989.4, "fp16": 989.4, "fp32": 494.7, "fp64": 66.9},
    "H100 NVL": {"bf16": 835.5, "fp16": 835.5, "fp32": 417.5, "fp64": 60.0},
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "fp32": 378.0, "fp64": 51.0},
    "H100": {"bf16": 989.4, "fp16": 989.4, "fp32": 494.7, "fp64": 66.9},
    "A100": {"bf16": 312.0, "fp16": 312.0, "fp32": 156.0, "fp64": 19.5},
    "V100": {"fp16": 125.0, "fp32": 15.7, "fp64": 7.8},
    "T4": {"fp16": 65.0, "fp32": 8.1},
}
"""Dense peak in TFLOP/s by part of the GPU's name and precision, from NVIDIA's data sheets of these GPUs, which state
twice the dense value where they assume sparsity. fp32 is the peak of TF32 where the GPU has it: cuDNN's convolutions
use it by default. The first name that matches counts, so that a variant comes before its family."""


def peak_flop_per_s(run: RunRecord, design: BatchDesign) -> float | None:
    """Return the peak FLOP per second of all processors of a run together; None if it is unknown."""
    topology = run.topology
    if topology.device == "cpu":
        cores = cores_per_rank(topology, design) * topology.workers
        is_bf16 = topology.precision == "bf16" and design.core_bf16_flop_per_s is not None
        core = design.core_bf16_flop_per_s if is_bf16 else design.core_flop_per_s
        return None if core is None else cores * core
    each = gpu_peak_flop_per_s(topology.device, str(run.config.get("precision", "fp32")))
    gpus = min(topology.workers, (design.gpus or topology.ranks_per_host) * hosts_of(topology))
    return None if each is None else gpus * each


def gpu_peak_flop_per_s(name: str, precision: str) -> float | None:
    """Return the cited dense peak of a GPU; None for an unknown GPU or number format."""
    known = next((peaks for part, peaks in GPU_PEAKS.items() if part in name), {})
    return known[precision] * TERA if precision in known else None
