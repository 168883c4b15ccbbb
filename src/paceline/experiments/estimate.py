"""How long an experiment will take, from a few samples trained in this process: said before anyone has to wait."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.config import RunConfig
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.checks import gpus_to_use
from paceline.measure.cores import usable_cores
from paceline.training.model_check import check_gradients
from paceline.training.precision import autocast, storage_dtype
from paceline.workloads.batches import Share, make_source
from paceline.workloads.load import load_workload

SAMPLES = 16
LAUNCH_S = 4.0
"""Starting ranks and importing torch in them, where there is a core for each."""
RUN_S = 0.5
"""Setting up and closing one run: groups, data, a dry backward pass."""
DOCTOR_S = 6.0
"""Examining the machine and the link, once the ranks have started."""
PROOF_STEPS = 8
"""Steps of a full batch that proving one strategy costs at most."""
SYNCHRONISING = 1.3
"""What a step takes more than its computation, as a guess for all strategies together."""


@dataclass(frozen=True)
class Trial:
    """What a few samples, trained in this process, tell of a run."""

    sample_s: float
    """Seconds per sample on as many threads as this host has cores."""
    steps_per_epoch: int
    tested: int
    """Samples that a run is tested on."""
    gradient_bytes: int


def estimate_s(
    candidate_configs: Sequence[CandidateConfig], ranks: int, repeats: int, *, proof: bool, doctor: bool
) -> float | None:
    """Seconds that the examination, the proofs and `repeats` repeats will take.

    None on a GPU, which is left alone until ranks start. A workload that cannot be trained is found out here.
    """
    if gpus_to_use(candidate_configs[0].config):
        return None
    launch_s = LAUNCH_S * max(1.0, ranks / usable_cores())
    trials: dict[RunConfig, Trial] = {}
    runs_s = proofs_s = 0.0
    for candidate_config in candidate_configs:
        alike = replace(candidate_config.config, strategy="")
        if alike not in trials:
            trials[alike] = try_out(candidate_config.config)
        trial = trials[alike]
        batch = candidate_config.config.global_batch(ranks)
        steps = candidate_config.config.steps or trial.steps_per_epoch * candidate_config.config.most_epochs
        slowest = max(candidate_config.config.slowed.values(), default=1.0)
        training_s = min(
            steps * batch * SYNCHRONISING * slowest * trial.sample_s, candidate_config.config.seconds or math.inf
        )
        runs_s += RUN_S + training_s + trial.tested / 3 * trial.sample_s
        proofs_s += RUN_S + PROOF_STEPS * min(batch, 8 * ranks) * trial.sample_s
    before_s = (launch_s + proofs_s if proof else 0.0) + (launch_s + DOCTOR_S if doctor else 0.0)
    return before_s + repeats * (launch_s + runs_s)


def try_out(config: RunConfig) -> Trial:
    """Trains a few samples on all cores of this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, int(usable_cores())))
    try:
        workload = load_workload(config)
        dtype = storage_dtype(config.precision)
        layout = torch.channels_last if config.channels_last else torch.preserve_format
        model = workload.model.to(dtype=dtype, memory_format=layout).train()  # type: ignore[call-overload]
        share = Share(0, 1, 1, torch.device("cpu"), dtype, config.channels_last)
        source = make_source(workload.train, share, batch=config.global_batch(1), seed=config.seed)
        check_gradients(model, workload, source, config, rank=0)
        samples = min(SAMPLES, config.global_batch(1))
        batch = source.peek(samples)
        times = []
        for _ in range(2 if batch is not None else 0):
            began = time.perf_counter()
            with autocast(config.precision, share.device):
                outcome = workload.forward(model, batch)
            outcome.loss.backward()
            times.append(time.perf_counter() - began)
        tested = len(workload.test) if config.evaluate and hasattr(workload.test, "__len__") else 0
        gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        return Trial(min(times, default=0.0) / samples, source.expected_steps or 1, tested, gradient_bytes)
    finally:
        torch.set_num_threads(before)
