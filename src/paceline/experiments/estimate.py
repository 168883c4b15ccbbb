"""Estimate the time of a comparison, from a few samples trained in this process."""

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
from paceline.training.checks.model import check_model
from paceline.training.precision import autocast, storage_dtype
from paceline.training.rank_setup import check_batch_fits
from paceline.workloads.batches import Share, make_source
from paceline.workloads.load import load_workload
from paceline.workloads.random_state import kept_random_state
from paceline.workloads.recipes import with_recipe

SAMPLES = 16
LAUNCH_S = 4.0
"""Seconds to start ranks that have a core each, import of torch included."""
RUN_S = 0.5
"""Seconds to set up and close one run: groups, data, a dry backward pass."""
DOCTOR_S = 6.0
"""Seconds to examine the machine and the link, once the ranks have started."""
PROOF_STEPS = 8
"""Most steps that the proof of one strategy takes."""
SYNCHRONISING = 1.3
"""Assumed time of a step ÷ its compute time, over all strategies."""


@dataclass(frozen=True)
class Trial:
    """Measurements from a few samples trained in this process."""

    sample_s: float
    """Seconds per sample on as many threads as this host has cores."""
    steps_per_epoch: int
    train_samples: int | None
    """None if the length of the data is unknown."""
    test_samples: int
    gradient_bytes: int


def estimate_s(
    candidate_configs: Sequence[CandidateConfig], ranks: int, repeats: int, *, proof: bool, doctor: bool
) -> float | None:
    """Return the seconds that the examination, the proofs and `repeats` repeats will take.

    None on a GPU, which this process must not occupy before ranks start. Raises if the workload cannot be trained.
    """
    if gpus_to_use(candidate_configs[0].config):
        return None
    launch_s = LAUNCH_S * max(1.0, ranks / usable_cores())
    trials: dict[RunConfig, Trial] = {}
    runs_s = proofs_s = 0.0
    for one in candidate_configs:
        same_workload = replace(one.config, strategy="")
        if same_workload not in trials:
            trials[same_workload] = run_trial(one.config)
        trial = trials[same_workload]
        check_batch_fits(one.config, ranks, trial.train_samples)
        batch = one.config.global_batch(ranks)
        steps = one.config.steps or trial.steps_per_epoch * one.config.most_epochs
        slowest = max(one.config.slowed.values(), default=1.0)
        training_s = min(steps * batch * SYNCHRONISING * slowest * trial.sample_s, one.config.seconds or math.inf)
        runs_s += RUN_S + training_s + trial.test_samples / 3 * trial.sample_s
        proofs_s += RUN_S + PROOF_STEPS * min(batch, 8 * ranks) * trial.sample_s
    before_s = (launch_s + proofs_s if proof else 0.0) + (launch_s + DOCTOR_S if doctor else 0.0)
    return before_s + repeats * (launch_s + runs_s)


def run_trial(config: RunConfig) -> Trial:
    """Train a few samples on all cores of this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, int(usable_cores())))
    try:
        with kept_random_state():  # Loading the workload seeds the generators of this process.
            workload = load_workload(config)
            assert workload.recipe is not None, "load_workload() sets the recipe"
            config = with_recipe(config, workload.recipe)
            dtype = storage_dtype(config.precision)
            layout = torch.channels_last if config.channels_last else torch.preserve_format
            model = workload.model.to(dtype=dtype, memory_format=layout).train()  # type: ignore[call-overload]
            share = Share(0, 1, 1, torch.device("cpu"), dtype, config.channels_last)
            source = make_source(workload.train, share, batch=config.global_batch(1), seed=config.seed)
            check_model(model, workload, source, config, rank=0)
            samples = min(SAMPLES, config.global_batch(1))
            batch = source.peek(samples)
            times = []
            for _ in range(2 if batch is not None else 0):
                began = time.perf_counter()
                with autocast(config.precision, share.device):
                    outcome = workload.forward(model, batch)
                outcome.loss.backward()
                times.append(time.perf_counter() - began)
            test_samples = len(workload.test) if config.evaluate and hasattr(workload.test, "__len__") else 0
            gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
            steps = source.expected_steps or 1
            return Trial(min(times, default=0.0) / samples, steps, source.samples, test_samples, gradient_bytes)
    finally:
        torch.set_num_threads(before)
