"""Guess the time of each part of an experiment before it starts, from a few samples trained in this process."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paceline.analysis.remaining_time import Part
from paceline.analysis.scaling.machines import MachineLayout, machines_of
from paceline.config import Precision, RunConfig
from paceline.config.emulation import parse_hosts, payload_bytes_per_s
from paceline.config.specs import Spec
from paceline.errors import WorkloadError
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.checks import gpus_to_use
from paceline.launch.launcher_process import Shape
from paceline.measure.cores import affine_cores, usable_cores
from paceline.measure.other_programs import OtherProgramsProbe
from paceline.plans import Gradient, all_reduce_lower_bound
from paceline.strategies.base.strategy import Role
from paceline.strategies.registry import ENTRIES, create, plan_of
from paceline.training.checks.model import check_model
from paceline.training.model_format import move_model
from paceline.training.precision import autocast, storage_dtype
from paceline.training.rank_setup import check_batch_fits
from paceline.workloads.batches import Share, Source, batch_size, make_source
from paceline.workloads.load import load_workload
from paceline.workloads.random_state import kept_random_state
from paceline.workloads.recipes import with_recipe
from paceline.workloads.workload import Workload

FEWEST_SAMPLES = 16
LONG_ENOUGH_S = 0.1
"""CPU time from which a trial shows the time of a sample, not that of calling the operators."""
OBSERVED_S = 0.5
"""Least time over which a trial observes the load of other programs, which changes from moment to moment."""
LAUNCH_S = 3.0
"""Seconds to start ranks that have a core each, import of torch included, and to end them."""
RUN_S = 0.3
"""Seconds to set up and close one run: groups, data, a dry backward pass."""
PROOF_S = 0.2
"""Seconds to set up and close one proof, whose ranks have loaded the data before."""
DOCTOR_S = 11.0
"""Seconds to examine the machine and the link, once the ranks have started; most of its parts have a fixed time."""
PROOF_STEPS = 8
"""Most steps that the proof of one strategy takes."""
SYNCHRONISING = 1.3
"""Assumed time of a step ÷ its compute time, over all strategies."""

ThreadsOf = Callable[[CandidateConfig], int]
"""Function that returns the compute threads of each rank of a candidate."""


@dataclass(frozen=True)
class Trial:
    """Measurements from a few samples trained in this process."""

    sample_cpu_s: float
    """CPU time per sample on one thread, which hardly depends on the load of the machine."""
    steps_per_epoch: int
    batch: int | None
    """Samples in a global batch of this trial, at most all of the data; None if the data determines it."""
    train_samples: int | None
    """None if the length of the data is unknown."""
    test_samples: int
    gradient_bytes: int
    precision: Precision | None = None
    """Number format of the recipe, which a user's workload may bring; None if it is unknown."""
    other_cores: float = 0.0
    """Cores that other programs would use during the trial if they had one for each thread."""
    threads_slowdown: float = 1.0
    """Time of a pass with a thread on every core ÷ the CPU time of one thread per core. The threads of a process wait
    for each other in every operator: where other programs use the cores, this is far more than their share."""

    def batch_of(self, config: RunConfig, workers: int) -> int | None:
        """Return the global batch of a run of the same workload, at most all of the data; None if the data sets it."""
        wanted = config.global_batch(workers)
        return None if self.batch is None else min(wanted, self.train_samples or wanted)

    def steps_of(self, config: RunConfig, workers: int) -> int:
        """Return the steps of a run of the same workload, unless its time ends it earlier."""
        return config.steps or self._epoch_steps(config, workers) * config.most_epochs

    def evaluations_of(self, config: RunConfig, workers: int, steps: float) -> int:
        """Return the evaluations of a run of some steps: while training, and after the last step if none is then."""
        if not config.evaluates_while_training:
            return 1
        every = config.eval_steps or self._epoch_steps(config, workers)
        return max(1, math.ceil(steps / every - 1e-9))  # The steps of a time may be 10.000000001.

    def _epoch_steps(self, config: RunConfig, workers: int) -> int:
        """Return the steps of an epoch at the batch of a run."""
        batch = self.batch_of(config, workers)
        relative = 1.0 if batch is None or self.batch is None else self.batch / batch
        return math.ceil(self.steps_per_epoch * relative)


Trials = Mapping[str, Trial]
"""Trial of the workload of each candidate, by name; empty on a GPU."""


def run_trials(candidate_configs: Sequence[CandidateConfig], *, check_batches: bool = True) -> Trials:
    """Train a few samples of each workload; raise if one cannot be trained.

    Raise for a batch that is larger than the data, unless `check_batches` is False.

    Return nothing on a GPU, which this process must not occupy before ranks start.
    """
    if gpus_to_use(candidate_configs[0].config):
        return {}
    alike: dict[RunConfig, list[CandidateConfig]] = {}
    for one in candidate_configs:  # The batch changes the number of steps, not the time of a sample.
        alike.setdefault(replace(one.config, strategy="", batch=None, batch_per_rank=None), []).append(one)
    trials = {}
    for group in alike.values():
        trial = run_trial(min((one.config for one in group), key=lambda config: config.global_batch(1)))
        for one in group:
            if check_batches:
                check_batch_fits(one.config, _workers(one), trial.train_samples)
            trials[one.candidate.name] = trial
    return trials


def guess_times(
    candidate_configs: Sequence[CandidateConfig], trials: Trials, place: MachineLayout, threads_of: ThreadsOf
) -> dict[Part, float]:
    """Return the expected seconds of each part of an experiment on an idle machine; nothing without trials."""
    if not trials:
        return {}
    guesses = {Part("examination"): DOCTOR_S}
    for one in candidate_configs:
        trial, name = trials[one.candidate.name], one.candidate.name
        guesses[launch_part(one.shape)] = _launch_s(one.shape.ranks, place)
        guesses[Part("run", name)] = _run_s(one, trial, place, threads_of(one))
        guesses[Part("proof", name)] = _proof_s(one, trial, place, threads_of(one))
    return guesses


def launch_part(shape: Shape) -> Part:
    """Return the part of an experiment that starts and ends ranks of a shape."""
    return Part("launch", f"{shape.hosts}x{shape.ranks_per_host}")


def load_slowdowns(
    candidate_configs: Sequence[CandidateConfig],
    trials: Trials,
    threads_of: ThreadsOf,
    averages: Callable[[], tuple[float, float, float]] = os.getloadavg,
) -> dict[Part, float]:
    """Return the factors by which the load of the machine may slow down parts; none for the examination.

    Ranks share the cores with other programs. How many of them there will be is the median of what the trial observed
    and of the load in the last minute and the last five: one moment may be unlike the minutes around it, and averages
    count programs that have ended, wait for a disk or give way. Ranks of several threads are as slow as those of the
    trial were.
    """
    cores = affine_cores()
    recent = [load * cores / (os.cpu_count() or cores) for load in averages()[:2]]
    found = {}
    for one in candidate_configs if trials else ():
        trial, name = trials[one.candidate.name], one.candidate.name
        shared = 1.0 + statistics.median([trial.other_cores, *recent]) / cores
        found[launch_part(one.shape)] = shared
        own = max(shared, trial.threads_slowdown) if threads_of(one) > 1 else shared
        found |= {Part("run", name): own, Part("proof", name): own}
    return found


def run_trial(config: RunConfig) -> Trial:
    """Train a few samples on one thread: several would wait for each other wherever other programs use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with kept_random_state():  # Loading the workload seeds the generators of this process.
            workload = load_workload(config)
            assert workload.recipe is not None, "load_workload() sets the recipe"
            config = with_recipe(config, workload.recipe)
            dtype = storage_dtype(config.precision)
            model, cpu = workload.model.train(), torch.device("cpu")
            move_model(model, config, cpu)
            share = Share(0, 1, 1, cpu, dtype, config.channels_last)
            source = make_source(workload.train, share, batch=config.global_batch(1), seed=config.seed)
            check_model(model, workload, source, config, rank=0)
            sample_cpu_s, other_cores, threads_slowdown = _observe_samples(model, workload, source, config)
            return Trial(
                sample_cpu_s=sample_cpu_s,
                other_cores=other_cores,
                threads_slowdown=threads_slowdown,
                steps_per_epoch=source.expected_steps or 1,
                batch=source.batch,
                train_samples=source.samples,
                test_samples=len(workload.test) if config.evaluate and hasattr(workload.test, "__len__") else 0,
                gradient_bytes=sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
                precision=config.precision,
            )
    finally:
        torch.set_num_threads(before)


def _observe_samples(
    model: nn.Module, workload: Workload, source: Source, config: RunConfig
) -> tuple[float, float, float]:
    """Return the CPU time per sample of a forward and a backward pass, and the `other_cores` and `threads_slowdown`.

    Where a few samples take no time, more of them are trained.
    """
    per_sample, wanted, size = 0.0, min(FEWEST_SAMPLES, config.global_batch(1)), 0
    others, batch = OtherProgramsProbe(), None
    while (found := source.peek(wanted)) is not None and _size_of(found, wanted) > size:
        batch, size = found, _size_of(found, wanted)
        for _ in range(2):  # The first pass allocates memory and chooses kernels.
            per_sample = _pass_cpu_s(model, workload, batch, config) / size
        wanted = min(4 * size, config.global_batch(1))
        if per_sample * size > LONG_ENOUGH_S or wanted == size:
            break
    passes_s = []
    while batch is not None and others.elapsed_s < OBSERVED_S:
        passes_s.append(_pass_cpu_s(model, workload, batch, config))
    if passes_s:  # One pass may take no time: under `ulimit -t`, Linux counts CPU time in ticks of a few milliseconds.
        per_sample = statistics.fmean(passes_s) / size
    other_cores, cores = others.wanted_cores() or 0.0, max(1, int(usable_cores()))
    if batch is None or cores == 1 or not per_sample:
        return per_sample, other_cores, 1.0
    torch.set_num_threads(cores)
    _pass_cpu_s(model, workload, batch, config)  # It starts the threads.
    passes, began_s = 0, time.perf_counter()
    while not passes or time.perf_counter() - began_s < OBSERVED_S:
        _pass_cpu_s(model, workload, batch, config)
        passes += 1
    pass_s = (time.perf_counter() - began_s) / passes
    return per_sample, other_cores, max(1.0, pass_s * cores / (per_sample * size))


def _pass_cpu_s(model: nn.Module, workload: Workload, batch: Any, config: RunConfig) -> float:
    """Return the CPU time of a forward and a backward pass."""
    began_s = time.process_time()
    with autocast(config.precision, torch.device("cpu")):
        outcome = workload.forward(model, batch)
    outcome.loss.backward()
    return time.process_time() - began_s


def _size_of(batch: Any, wanted: int) -> int:
    """Return the samples in a batch: of an iterable fewer than wanted, and as wanted where they cannot be counted."""
    try:
        return batch_size(batch)
    except WorkloadError:
        return wanted


def _workers(one: CandidateConfig) -> int:
    return create(one.config.strategy).roles(one.shape.ranks).count(Role.WORKER)


def _launch_s(ranks: int, place: MachineLayout) -> float:
    """Return the seconds of one launch: every rank imports torch, on the cores available."""
    return LAUNCH_S * float(max(1.0, ranks / place.machine_cores, 1 / (place.host_cpus or 1.0)))


def _run_s(one: CandidateConfig, trial: Trial, place: MachineLayout, threads: int) -> float:
    config, workers = one.config, _workers(one)
    sample_s = _sample_s(one, trial, place, threads)
    batch = trial.batch_of(config, workers) or config.global_batch(workers)
    slowest = max(config.slowed.values(), default=1.0)
    step_s = batch * sample_s * SYNCHRONISING * slowest + _wire_s(one, trial, place)
    steps = trial.steps_of(config, workers)
    training_s = min(steps * step_s, config.seconds or math.inf)
    evaluations = trial.evaluations_of(config, workers, training_s / step_s if step_s else steps)
    return RUN_S + training_s + evaluations * trial.test_samples / 3 * sample_s


def _proof_s(one: CandidateConfig, trial: Trial, place: MachineLayout, threads: int) -> float:
    workers = _workers(one)
    samples = PROOF_STEPS * min(one.config.global_batch(workers), 8 * workers)
    return PROOF_S + samples * _sample_s(one, trial, place, threads)


def _sample_s(one: CandidateConfig, trial: Trial, place: MachineLayout, threads: int) -> float:
    """Return the seconds per sample, on the cores that a candidate's ranks have together."""
    workers, share = _workers(one), place.host_cpus
    hosts = -(-workers // one.shape.ranks_per_host)
    limits = [float(workers * threads), place.machine_cores * len(set(machines_of(place, hosts)))]
    cores = min([*limits, *([share * hosts] if share is not None else [])])
    return trial.sample_cpu_s / cores


def _wire_s(one: CandidateConfig, trial: Trial, place: MachineLayout) -> float:
    """Return the seconds that gradients take on emulated links of a known rate; 0 elsewhere."""
    rates = [host.rate_bit_s for host in parse_hosts(place.emulated)] if place.emulated else []
    known = [rate for rate in rates if rate is not None]
    if not known or one.shape.hosts == 1 or one.candidate.role != "candidate":
        return 0.0
    link_bytes = _link_bytes(one.candidate.strategy, one.shape, trial.gradient_bytes)
    return link_bytes / payload_bytes_per_s(min(known))


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
