"""How long a scaling experiment will take: what a few samples cost here, on the cores and links that each point has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.analysis.scaling.machines import machines_of
from paceline.config import ScaleConfig
from paceline.config.emulation import parse_hosts
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.checks import gpus_to_use
from paceline.experiments.estimate import DOCTOR_S, LAUNCH_S, PROOF_STEPS, RUN_S, SYNCHRONISING, Trial, try_out
from paceline.measure.cores import usable_cores

THROUGH_ONE_RANK = frozenset({"gather_scatter", "p2p"})
"""Strategies whose traffic passes through rank 0, so that its link carries the more, the more ranks there are."""
BITS = 8 * 1514 / 1448
"""On the wire for each byte of payload."""


def estimate_s(
    candidate_configs: Sequence[CandidateConfig], config: ScaleConfig, place: Mapping[str, Any]
) -> float | None:
    """Seconds until all is measured; None on a GPU, which is left alone until ranks start.

    A workload that cannot be trained is found out here.
    """
    if gpus_to_use(candidate_configs[0].config):
        return None
    trial = try_out(
        min((candidate_config.config for candidate_config in candidate_configs), key=lambda own: own.global_batch(1))
    )
    return foreseen_s(candidate_configs, config, place, trial, trial.sample_s * max(1, int(usable_cores())))


def foreseen_s(
    candidate_configs: Sequence[CandidateConfig],
    config: ScaleConfig,
    place: Mapping[str, Any],
    trial: Trial,
    core_s: float,
) -> float:
    """The same, given what a trial found and the seconds that a core needs for a sample."""
    runs_s = sum(_run_s(candidate_config, trial, core_s, place) for candidate_config in candidate_configs)
    shapes = {candidate_config.shape for candidate_config in candidate_configs}
    launches_s = sum(_launch_s(shape.ranks, place) for shape in shapes)
    largest = max(shape.ranks for shape in shapes)
    strategies = len({candidate_config.candidate.strategy for candidate_config in candidate_configs}) - 1
    proof_s = strategies * (RUN_S + PROOF_STEPS * 8 * largest * core_s / _cores(largest, 1, place))
    before_s = (_launch_s(largest, place) + proof_s) * config.proof
    before_s += (_launch_s(largest, place) + DOCTOR_S) * config.doctor
    return before_s + config.repeats * (launches_s + runs_s)


def _launch_s(ranks: int, place: Mapping[str, Any]) -> float:
    """Starting ranks imports torch in each of them, on whatever cores they have."""
    return LAUNCH_S * float(max(1.0, ranks / place["machine_cores"], 1 / (place["host_cpus"] or 1.0)))


def _run_s(candidate_config: CandidateConfig, trial: Trial, core_s: float, place: Mapping[str, Any]) -> float:
    shape, config = candidate_config.shape, candidate_config.config
    batch = config.global_batch(shape.ranks)
    steps = config.steps or trial.steps_per_epoch * config.most_epochs
    computing_s = batch * core_s * SYNCHRONISING / _cores(shape.ranks, shape.hosts, place)
    return RUN_S + min(steps * (computing_s + _wire_s(candidate_config, trial, place)), config.seconds or math.inf)


def _cores(ranks: int, hosts: int, place: Mapping[str, Any]) -> float:
    """Cores that a point has: no more than its ranks, its hosts' shares, and their machines, taken to be alike."""
    share = place["host_cpus"]
    limits = [float(ranks), *([share * hosts] if share is not None else [])]
    return float(min([*limits, place["machine_cores"] * len(set(machines_of(place, hosts)))]))


def _wire_s(candidate_config: CandidateConfig, trial: Trial, place: Mapping[str, Any]) -> float:
    """What gradients take on emulated links of a known rate."""
    rates = [host.rate_bit_s for host in parse_hosts(place["emulated"])] if place["emulated"] else []
    known = [rate for rate in rates if rate is not None]
    hosts, ranks = candidate_config.shape.hosts, candidate_config.shape.ranks
    if not known or hosts == 1 or candidate_config.candidate.role != "candidate":
        return 0.0
    times = 2 * (ranks - 1) if candidate_config.candidate.strategy in THROUGH_ONE_RANK else 2 * (ranks - 1) / ranks
    return times * trial.gradient_bytes * BITS / min(known)
