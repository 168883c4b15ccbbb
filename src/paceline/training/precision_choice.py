"""Choice of `--precision auto`: bf16 with channels-last images, or fp32 as configured, the same on all ranks.

On CPUs, all ranks run forward and backward passes of the model at the same time, in both number formats in turn, on
samples and threads of this run. Times are CPU times of all threads: on two busy cores, wall times of the same pass
differ by a factor of two. The fastest pass of each counts, since other programs can only slow one down. A synchronous
step is as slow as the slowest rank, so the times compared are those of the slowest rank in each format. bf16 is chosen
if every rank's processor has instructions for it, it is at least `FASTER` times as fast, and it gives the same loss.

On GPUs nothing is measured: from compute capability 8.0 on, matrix units multiply bf16 at twice the rate of TF32 or
more, and half as many bytes move. Measuring would occupy seconds for cuDNN's first calls.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.comm.messages.json_messages import gather_typed, receive_typed, send_typed
from paceline.comm.messages.nested_tensors import tensors_in
from paceline.config import Precision, RunConfig
from paceline.measure.bf16_instructions import has_bf16_instructions
from paceline.records.precision import PrecisionChoice, PrecisionReason
from paceline.records.precision_file import add_choice, read_choices
from paceline.training.precision import autocast
from paceline.workloads.batches import Share, Source, batch_size, make_source
from paceline.workloads.random_state import kept_random_state, seeded
from paceline.workloads.workload import Workload

FASTER = 1.1
"""Least ratio of the times at which bf16 is chosen.

bf16 rounds activations to 8 bits, which less than that is not worth. Fastest passes of a second repeat within about 5%
on a busy machine.
"""
LOSS_TOLERANCE = 0.02
"""Largest relative difference of the losses. Rounding to bf16 changes the first loss of the built-in models by up to
1%."""
BUDGET_S = 3.0
"""Seconds that the passes may take, warm-up included, unless `FEWEST_SAMPLES` take longer."""
FEWEST_SAMPLES = 4
LEAST_ROUNDS, MOST_ROUNDS = 3, 10
"""Fewest and most passes in each number format. More passes than these hardly change the fastest one."""
COMPUTE_CAPABILITY = (8, 0)
"""Compute capability from which GPUs have matrix units for bf16."""
FORMATS: tuple[Precision, Precision] = ("fp32", "bf16")


def agree_on_precision(config: RunConfig, workload: Workload, comm: Comm, file: Path | None) -> PrecisionChoice:
    """Return the number format for a run; called on all ranks with the model on its device, servers included.

    A choice that `file` has on rank 0 holds: runs of one experiment have one number format, and so has a run that is
    restarted. A new choice is added to it.
    """
    if comm.is_server:
        return receive_typed(PrecisionChoice, 0, comm.full_group)
    key = _key(config)
    known = [read_choices(file)[key]] if comm.rank == 0 and file is not None and key in read_choices(file) else []
    earlier = gather_typed(known, list[PrecisionChoice], comm.control)[0]
    choice = earlier[0] if earlier else _choose(config, workload, comm)
    if comm.rank == 0:
        if file is not None and not earlier:
            add_choice(file, key, choice)
        for server in range(comm.world_size, comm.world_size + comm.servers):
            send_typed(choice, server, comm.full_group)
    return choice


def with_choice(config: RunConfig, choice: PrecisionChoice) -> RunConfig:
    """Return the config with the chosen number format."""
    return replace(config, precision=choice.precision, channels_last=choice.channels_last)  # type: ignore[arg-type]


def _key(config: RunConfig) -> str:
    """Return the settings that a choice depends on.

    The batch is not one of them, so that an experiment over batch sizes has one number format.
    """
    layout = "channels_last" if config.channels_last else "any layout"
    kernels = "deterministic" if config.deterministic else "any kernels"
    return f"{config.workload} on {config.data}, {config.device}, {layout}, {kernels}"


def _choose(config: RunConfig, workload: Workload, comm: Comm) -> PrecisionChoice:
    began_s = time.perf_counter()
    control = comm.control
    share = Share(comm.rank, comm.world_size, config.accumulate, comm.device, channels_last=config.channels_last)
    source = make_source(
        workload.train,
        share,
        batch=config.global_batch(comm.world_size),
        seed=config.seed,
        reshuffle=config.reshuffle,
    )
    on_gpu = comm.device.type == "cuda"
    has_bf16 = (
        torch.cuda.get_device_capability(comm.device) >= COMPUTE_CAPABILITY if on_gpu else has_bf16_instructions()
    )
    if not control.smallest(int(has_bf16)):
        return _fp32(config, "old_gpu" if on_gpu else "no_instructions")
    with kept_random_state(comm.device), _kept_buffers(workload.model):
        sample = _peek(source, FEWEST_SAMPLES)
        images = bool(control.smallest(int(sample is not None and _takes_channels_last(workload.model, sample))))
        if on_gpu:
            return PrecisionChoice(precision="bf16", channels_last=config.channels_last or images, reason="gpu")
        if not control.smallest(int(sample is not None)):
            return _fp32(config, "unmeasured", error="the training data can be read only once")
        choice = _measure(config, workload, comm, source, images=images)
    return _timed(choice, began_s)


def _measure(config: RunConfig, workload: Workload, comm: Comm, source: Source, *, images: bool) -> PrecisionChoice:
    """Measure passes of few samples, then of as many as a micro-batch has, or as the budget allows."""
    passes = Passes(workload, source, images=images)
    wanted = math.ceil(config.global_batch(comm.world_size) / comm.world_size / config.accumulate)
    found = _agreed(passes.run(min(FEWEST_SAMPLES, wanted), rounds=2), comm)
    samples = min(rank.samples for rank in found)
    if not _error(found):
        pair_s = max(rank.pair_s for rank in found)
        affordable = int(samples * BUDGET_S / (LEAST_ROUNDS + 1) / pair_s)
        size = min(wanted, max(samples, affordable))
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(BUDGET_S / (pair_s * size / samples)) - 1))
        if rounds * pair_s <= 2 * BUDGET_S:  # Otherwise, passes of so few samples take too long to repeat.
            found = _agreed(passes.run(size, rounds, warm_up=True), comm)
    return _decide(config, found, images=images)


class Measured(Struct, frozen=True, kw_only=True):
    """Passes of one rank in both number formats."""

    samples: int
    cpu_s: list[float] = []
    """CPU time of the fastest pass in fp32 and in bf16."""
    pair_s: float = 0.0
    """Wall time of the fastest pass in each, together."""
    losses: list[list[float | None]] = []
    """Losses in fp32 and in bf16, by pass."""
    error: str = ""
    failed: str = ""
    """Number format of the pass that failed."""


class Passes:
    """Forward and backward passes of a model on one rank, in both number formats."""

    def __init__(self, workload: Workload, source: Source, *, images: bool) -> None:
        self._workload, self._source, self._images = workload, source, images
        tensors = [*workload.model.parameters(), *workload.model.buffers()] if images else []
        four = [tensor for tensor in tensors if tensor.dim() == 4]
        self._plain: list[tuple[Tensor, Tensor]] = [(tensor, tensor.data) for tensor in four]
        self._converted = [(t, t.data.contiguous(memory_format=torch.channels_last)) for t in four]

    def run(self, samples: int, rounds: int, *, warm_up: bool = False) -> Measured:
        """Run passes in both number formats, in turn and in changing order; an error of the model ends them."""
        times: dict[Precision, list[tuple[float, float]]] = {name: [] for name in FORMATS}
        losses: dict[Precision, list[float | None]] = {name: [] for name in FORMATS}
        name: Precision = "fp32"
        try:
            plain = self._source.peek(samples)
            batches = {"fp32": plain, "bf16": self._with_layout(plain)}
            for number in range(-1 if warm_up else 0, rounds):
                for name in FORMATS if number % 2 == 0 else reversed(FORMATS):
                    with seeded(number + 1):
                        cpu_s, wall_s, loss = self._pass(name, batches[name])
                    if number >= 0:
                        times[name].append((cpu_s, wall_s))
                        losses[name].append(loss)
            samples = batch_size(plain)
        except Exception as error:  # It is the user's code that fails.
            return Measured(
                samples=samples,
                error=f"{type(error).__name__}: {error}"[:500],
                failed=name,
            )
        finally:
            self._swap(self._plain)
            self._workload.model.zero_grad(set_to_none=True)
        return Measured(
            samples=samples,
            cpu_s=[min(cpu_s for cpu_s, _ in times[name]) for name in FORMATS],
            pair_s=sum(min(wall_s for _, wall_s in times[name]) for name in FORMATS),
            losses=[losses[name] for name in FORMATS],
        )

    def _with_layout(self, batch: Any) -> Any:
        return replace(self._source.share, channels_last=True).to_device(batch) if self._images else batch

    def _pass(self, name: Precision, batch: Any) -> tuple[float, float, float | None]:
        """Return CPU time, wall time and loss of a pass; None for a loss or gradients that are not finite."""
        model = self._workload.model
        self._swap(self._converted if name == "bf16" else self._plain)
        model.zero_grad(set_to_none=True)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        with autocast(name, self._source.share.device):
            loss = self._workload.forward(model, batch).loss
        loss.backward()
        cpu_s, wall_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
        cpu_s = (
            cpu_s or wall_s
        )  # Under `ulimit -t`, Linux counts CPU time in ticks, and a short pass seems to take none.
        norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
        finite = all(bool(torch.isfinite(value)) for value in [loss.detach(), *norms])
        return cpu_s, wall_s, loss.item() if finite else None

    def _swap(self, layout: Sequence[tuple[Tensor, Tensor]]) -> None:
        for tensor, data in layout:
            tensor.data = data


def _agreed(own: Measured, comm: Comm) -> list[Measured]:
    """Return the passes of every rank, on every rank."""
    return gather_typed(own, Measured, comm.control)


def _error(found: Sequence[Measured]) -> str:
    return next((rank.error for rank in found if rank.error), "")


def _slowest(found: Sequence[Measured]) -> list[float]:
    """Return the CPU time of the slowest rank in each number format."""
    return [max(rank.cpu_s[number] for rank in found) for number in range(len(FORMATS))]


def _decide(config: RunConfig, found: Sequence[Measured], *, images: bool) -> PrecisionChoice:
    error = _error(found)
    if error:
        in_fp32 = any(rank.failed == "fp32" for rank in found)
        return _fp32(config, "unmeasured" if in_fp32 else "bf16_failed", error=error)
    fp32_s, bf16_s = _slowest(found)
    differences = [loss_difference(*rank.losses) for rank in found]
    agree = all(difference is not None and difference <= LOSS_TOLERANCE + spread for difference, spread in differences)
    reason: PrecisionReason = "losses_differ" if not agree else "faster" if fp32_s >= FASTER * bf16_s else "not_faster"
    is_bf16 = reason == "faster"
    known = [difference for difference, _ in differences if difference is not None]
    return PrecisionChoice(
        precision="bf16" if is_bf16 else "fp32",
        channels_last=config.channels_last or (is_bf16 and images),
        reason=reason,
        speedup=fp32_s / bf16_s,
        loss_difference=max(known) if len(known) == len(found) else None,
        samples=min(rank.samples for rank in found),
        passes=len(found[0].losses[0]),
    )


def loss_difference(fp32: Sequence[float | None], bf16: Sequence[float | None]) -> tuple[float | None, float]:
    """Return the difference of the mean losses ÷ that in fp32, and the range of fp32's losses ÷ their mean.

    A model that draws random numbers has other losses in each pass, by which the means differ too. The difference is
    None if a loss is not finite.
    """
    exact, rounded = ([loss for loss in losses if loss is not None] for losses in (fp32, bf16))
    if len(exact) < len(fp32) or len(rounded) < len(bf16):
        return None, 0.0
    mean, other = (math.fsum(losses) / len(losses) for losses in (exact, rounded))
    unit = max(abs(mean), 1e-12)
    return abs(other - mean) / unit, (max(exact) - min(exact)) / unit


def _fp32(config: RunConfig, reason: PrecisionReason, error: str = "") -> PrecisionChoice:
    return PrecisionChoice(precision="fp32", channels_last=config.channels_last, reason=reason, error=error)


def _timed(choice: PrecisionChoice, began_s: float) -> PrecisionChoice:
    return msgspec.structs.replace(choice, measured_s=time.perf_counter() - began_s)


def _peek(source: Source, samples: int) -> Any | None:
    """Return a few samples; None if they cannot be read, which the check of the data reports better than this."""
    try:
        return source.peek(samples)
    except Exception:
        return None


def _takes_channels_last(model: nn.Module, batch: Any) -> bool:
    """Whether inputs have four dimensions, as images do, and no weight has five, as those of volumes have.

    It is not known what volumes gain from the layout on GPUs, where nothing is measured.
    """
    weights = itertools.chain(model.parameters(), model.buffers())
    return any(tensor.dim() == 4 for tensor in tensors_in(batch)) and all(weight.dim() != 5 for weight in weights)


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers after the `with` block; passes change running statistics."""
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in kept and kept[name].shape == buffer.shape:
                    buffer.copy_(kept[name])
