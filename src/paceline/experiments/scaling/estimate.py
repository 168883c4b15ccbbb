"""Estimate the time of a scaling experiment, from a few samples and the cores and links of each point."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from paceline.analysis.scaling.machines import MachineLayout, machines_of
from paceline.config.emulation import parse_hosts
from paceline.config.specs import Spec
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.checks import gpus_to_use
from paceline.experiments.engine import MeasurementConfig
from paceline.experiments.estimate import DOCTOR_S, LAUNCH_S, PROOF_STEPS, RUN_S, SYNCHRONISING, Trial, run_trial
from paceline.launch.launcher_process import Shape
from paceline.measure.cores import usable_cores
from paceline.plans import Gradient, all_reduce_lower_bound
from paceline.strategies.base.strategy import Role
from paceline.strategies.registry import ENTRIES, create, plan_of
from paceline.training.rank_setup import check_batch_fits

BITS = 8 * 1514 / 1448
"""Bits on the wire per byte of payload."""


def estimate_s(
    candidate_configs: Sequence[CandidateConfig], config: MeasurementConfig, place: MachineLayout
) -> float | None:
    """Return the seconds until everything is measured; None on a GPU. Raises if the workload cannot be trained."""
    if gpus_to_use(candidate_configs[0].config):
        return None
    trial = run_trial(min((one.config for one in candidate_configs), key=lambda own: own.global_batch(1)))
    for one in candidate_configs:
        check_batch_fits(one.config, one.shape.ranks, trial.train_samples)
    return estimate_from_trial(candidate_configs, config, place, trial, trial.sample_s * max(1, int(usable_cores())))


def estimate_from_trial(
    candidate_configs: Sequence[CandidateConfig],
    config: MeasurementConfig,
    place: MachineLayout,
    trial: Trial,
    core_s: float,
) -> float:
    """Return the estimate from a trial and the seconds that one core needs per sample."""
    runs_s = sum(_run_s(one, trial, core_s, place) for one in candidate_configs)
    shapes = {one.shape for one in candidate_configs}
    launches_s = sum(_launch_s(shape.ranks, place) for shape in shapes)
    largest = max(shape.ranks for shape in shapes)
    strategies = len({one.candidate.strategy for one in candidate_configs}) - 1
    proof_s = strategies * (RUN_S + PROOF_STEPS * 8 * largest * core_s / _cores(largest, 1, place))
    before_s = (_launch_s(largest, place) + proof_s) * config.proof
    before_s += (_launch_s(largest, place) + DOCTOR_S) * config.doctor
    return before_s + config.repeats * (launches_s + runs_s)


def _launch_s(ranks: int, place: MachineLayout) -> float:
    """Return the seconds of one launch: every rank imports torch, on the cores available."""
    return LAUNCH_S * float(max(1.0, ranks / place.machine_cores, 1 / (place.host_cpus or 1.0)))


def _run_s(one: CandidateConfig, trial: Trial, core_s: float, place: MachineLayout) -> float:
    shape, config = one.shape, one.config
    batch = config.global_batch(shape.ranks)
    steps = config.steps or _steps_per_epoch(batch, trial) * config.most_epochs
    computing_s = batch * core_s * SYNCHRONISING / _cores(shape.ranks, shape.hosts, place)
    return RUN_S + min(steps * (computing_s + _wire_s(one, trial, place)), config.seconds or math.inf)


def _steps_per_epoch(batch: int, trial: Trial) -> int:
    """Return the steps of an epoch at a batch, which may not be that of the trial."""
    return trial.steps_per_epoch if trial.train_samples is None else math.ceil(trial.train_samples / batch)


def _cores(ranks: int, hosts: int, place: MachineLayout) -> float:
    """Return the cores of a point: the least of its ranks, its hosts' shares, and the cores of its machines."""
    share = place.host_cpus
    limits = [float(ranks), *([share * hosts] if share is not None else [])]
    return float(min([*limits, place.machine_cores * len(set(machines_of(place, hosts)))]))


def _wire_s(one: CandidateConfig, trial: Trial, place: MachineLayout) -> float:
    """Return the seconds that gradients take on emulated links of a known rate; 0 elsewhere."""
    rates = [host.rate_bit_s for host in parse_hosts(place.emulated)] if place.emulated else []
    known = [rate for rate in rates if rate is not None]
    if not known or one.shape.hosts == 1 or one.candidate.role != "candidate":
        return 0.0
    return _link_bytes(one.candidate.strategy, one.shape, trial.gradient_bytes) * BITS / min(known)


def _link_bytes(text: str, shape: Shape, gradient_bytes: int) -> int:
    """Return the bytes of a step on the busiest link, by the plan; those of a ring for a user's strategy."""
    gradient = Gradient("all parameters", gradient_bytes // 4)
    if Spec.parse(text).name not in ENTRIES:
        return all_reduce_lower_bound(gradient.items, gradient.item_bytes, shape.ranks)
    strategy, each = create(text), shape.ranks_per_host
    workers = strategy.roles(shape.ranks).count(Role.WORKER)
    hosts = [range(host * each, (host + 1) * each) for host in range(shape.hosts)]
    plan = plan_of(text)([gradient], workers, hosts=hosts, **dataclasses.asdict(strategy.options))
    return plan.serial_link_bytes(shape.ranks)
