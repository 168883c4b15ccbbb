"""Measure gradient noise while training: norms of the gradients of micro-batches, and of their mean over the ranks.

Micro-batch i has n_i samples and the mean gradient g_i; the K micro-batches of all ranks form a batch of B samples,
whose gradient is G = Σ n_i g_i ÷ B. With |G₀|² the squared norm of the exact gradient and tr Σ the variance of one
sample's gradient, E|g_i|² = |G₀|² + tr Σ ÷ n_i, and E|G|² = |G₀|² + tr Σ ÷ B. So

    tr Σ ≈ (Σ n_i |g_i|² − B |G|²) ÷ (K − 1)        |G₀|² ≈ |G|² − tr Σ ÷ B

are unbiased for micro-batches of any sizes. For equal sizes they are the estimators of McCandlish et al., "An Empirical
Model of Large-Batch Training", 2018, appendix A.1.

Only some steps are measured. A norm stays on the device until the end of a window, so no step waits for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from paceline.config import NoiseScaleMode
from paceline.records.events import NoiseFigures
from paceline.strategies.base.abilities import MayLackMean
from paceline.strategies.base.scaling import current_scale
from paceline.strategies.base.strategy import Strategy

TIME_SHARE = 0.004
"""Share of the training time that measuring may take."""
FIRST_STEP, FIRST_PERIOD = 1, 16
"""First step that is measured, counted from 0, and the steps from one to the next until their cost is known."""
LARGEST_PERIOD = 200
"""Most steps from one that is measured to the next, so that a short run has a value too. Where the others are replayed
from CUDA graphs, a measured step may take five times as long: then measuring takes 2% of the training time."""


class NoiseShare(NamedTuple):
    """Contribution of one rank to the figures of a step; all of them are summed over the ranks."""

    small: float = 0.0
    """Σ n_i |g_i|² over its micro-batches."""
    micro_batches: float = 0.0
    samples: float = 0.0
    mean: float = 0.0
    """|G|², or the part of it that this rank has."""
    means: float = 0.0
    """Nonzero if this rank has the mean gradient, or a part of it."""
    cost_s: float = 0.0


@dataclass
class NoiseSample:
    """Norms of one step on one rank, still on the device. The mean may arrive after the end of the step."""

    micro_batches: int = 0
    samples: int = 0
    small: Tensor | None = None
    means: list[Tensor] = field(default_factory=list)
    cost_s: float = 0.0
    """Seconds that this rank's host spent on it. If other steps are replayed from CUDA graphs, which run no hooks, also
    those that the host took longer than for one of them.

    On a GPU that is the time to start the kernels, not to run them: some microseconds per parameter, in which a GPU
    computes the norm of millions of numbers. So it is too small for models whose average parameter is larger, and too
    large where the GPU, not the host, limits the speed. Events around each kernel would cost more than the kernels.
    """

    def read(self) -> NoiseShare:
        """Return the figures; waits for the device."""
        return NoiseShare(
            small=0.0 if self.small is None else float(self.small),
            micro_batches=self.micro_batches,
            samples=self.samples,
            mean=float(sum(self.means)),
            means=len(self.means),
            cost_s=self.cost_s,
        )


def figures_of(shares: Tensor, ranks: int) -> NoiseFigures | None:
    """Return the figures of a window from the sums over the ranks, with a row per measured step; None without any.

    A step counts if all norms are finite and there was more than one micro-batch.
    """
    small, micro_batches, samples, mean, means, cost_s = shares.unbind(1)
    counts = (means > 0) & (micro_batches > 1) & torch.isfinite(small) & torch.isfinite(mean)
    if not counts.any():
        return None
    small, micro_batches, samples, mean = (column[counts] for column in (small, micro_batches, samples, mean))
    trace = (small - samples * mean) / (micro_batches - 1)
    return NoiseFigures(
        steps=int(counts.sum()),
        trace=float(trace.mean()),
        gradient_sq=float((mean - trace / samples).mean()),
        cost_s=float(cost_s[counts].sum()) / ranks,
    )


class NoiseSampler:
    """Measurement of gradient noise on one rank, in the same steps on all ranks.

    Call `begin_step`, `begin_micro_batch` before each forward pass, `end_backward` after the last backward pass and
    before the strategy's step, and `end_step` after it.
    """

    def __init__(self, mode: NoiseScaleMode, strategy: Strategy, ranks: int, micro_batches: int) -> None:
        self.reason = why_not_measured(mode, strategy, ranks, micro_batches)
        """Sentence that says why nothing is measured; None if it is."""
        self._strategy = strategy
        self._every_step = mode == "all"
        self._period = 1 if self._every_step else FIRST_PERIOD
        self._next = FIRST_STEP
        self._sample: NoiseSample | None = None
        """Sample of the current step, if it is measured."""
        self._awaiting: NoiseSample | None = None
        """Sample of the last step: a strategy may know the mean, or parts of it, only in the next forward pass."""
        self._hooks: list[RemovableHandle] = []
        self._norms: list[Tensor] = []
        """Norms of the gradients of the current micro-batch."""
        self._micro_batch: tuple[int, float] | None = None
        """Samples and weight of the current micro-batch."""
        self._parts: list[tuple[int, float, Tensor]] = []
        """Samples, weight and squared norm of the gradient of each micro-batch."""
        self._cost_s, self._measured = 0.0, 0
        self._nodes: list[Any] = []
        """Nodes that accumulate gradients; autograd keeps them only while something refers to them.

        They are kept during measured steps only: a node remembers the stream in which it was made, and the capture of a
        backward pass as a CUDA graph fails if that is not the stream of the capture.
        """
        self._began_s = 0.0
        self._are_others_replayed = False
        self._others, self._others_s = 0, 0.0
        """Number of replayed steps, and seconds that the host took for them."""

    def begin_step(self, step: int) -> None:
        """Begin a step, with its number over all ranks; add hooks to the parameters if it is measured."""
        self._began_s = time.perf_counter()
        if self.reason is not None or step < self._next:
            return
        self._sample = NoiseSample()
        self._next = step + self._period
        self._nodes = [get_gradient_edge(parameter).node for _, parameter in self._strategy.parameters]
        self._hooks = [node.register_prehook(self._on_gradient) for node in self._nodes]
        self._sample.cost_s += time.perf_counter() - self._began_s

    @property
    def is_measuring(self) -> bool:
        """Whether the current step is measured. Its backward passes must run hooks."""
        return self._sample is not None

    def begin_micro_batch(self, samples: int, weight: float) -> None:
        """Begin a micro-batch of so many samples, whose loss is multiplied by a weight."""
        if self._sample is not None:
            self._end_micro_batch(self._sample)
            self._micro_batch = samples, weight

    def end_backward(self, scaler: GradScaler | None) -> None:
        """End the backward passes of a step, before the mean is known and the scale changes."""
        self._awaiting = sample = self._sample
        self._strategy.on_mean = None if sample is None else self._add_mean
        if sample is None:
            return
        start = time.perf_counter()
        self._end_micro_batch(sample)
        self._remove_hooks()
        if self._parts:
            factors = [samples / weight**2 for samples, weight, _ in self._parts]
            # A tensor of the factors would be copied from the host, which would wait for the whole backward pass.
            squares = torch._foreach_mul([square for _, _, square in self._parts], factors)
            sample.small = torch.stack(squares).sum() / current_scale(scaler) ** 2
        self._parts = []
        sample.cost_s += time.perf_counter() - start

    def end_step(self) -> NoiseSample | None:
        """End the step; return its sample, None if it is not measured."""
        sample, self._sample = self._sample, None
        if self._are_others_replayed:
            took_s = time.perf_counter() - self._began_s
            if sample is None:
                self._others, self._others_s = self._others + 1, self._others_s + took_s
            else:
                sample.cost_s = max(sample.cost_s, took_s - self._others_s / max(1, self._others))
        return sample

    def begin_replays(self) -> None:
        """Note that steps are replayed from CUDA graphs from now on, unless they are measured; called on all ranks.

        A measured step then costs more than before, so its cost is unknown again.
        """
        self._are_others_replayed = True
        self._cost_s, self._measured = 0.0, 0
        self._set_period(FIRST_PERIOD)

    def adapt(self, figures: NoiseFigures | None, wall_s: float, steps: int) -> None:
        """Choose how often to measure, from the figures, time and steps of a window: the same on all ranks."""
        if figures is None or self._every_step:
            return
        self._cost_s += figures.cost_s
        self._measured += figures.steps
        each_s = self._cost_s / self._measured
        # A window may have few steps, of which a measured one takes several times as long as the others.
        affordable_s = TIME_SHARE * (wall_s - figures.cost_s) / steps
        is_rare = each_s >= LARGEST_PERIOD * affordable_s
        self._set_period(LARGEST_PERIOD if is_rare else max(1, math.ceil(each_s / affordable_s)))

    def close(self) -> None:
        """Remove everything that was added."""
        self._remove_hooks()
        self._strategy.on_mean = None
        self._sample, self._awaiting = None, None

    def _set_period(self, period: int) -> None:
        self._next += period - self._period
        self._period = period

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes = [], []

    def _on_gradient(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the norm of a parameter's gradient of this micro-batch, before it is added to that of earlier ones."""
        start = time.perf_counter()
        sample = self._sample
        for gradient in gradients:
            if gradient is not None and sample is not None:
                self._norms.append(_norm(gradient))
        if sample is not None:
            sample.cost_s += time.perf_counter() - start

    def _end_micro_batch(self, sample: NoiseSample) -> None:
        if self._micro_batch is not None and self._norms:
            samples, weight = self._micro_batch
            sample.micro_batches += 1
            sample.samples += samples
            self._parts.append((samples, weight, _sum_of_squares(self._norms)))
        self._micro_batch, self._norms = None, []

    def _add_mean(self, gradients: Sequence[Tensor]) -> None:
        """Add the norm of the mean gradient over the ranks, or of a part of it."""
        start = time.perf_counter()
        sample = self._awaiting
        assert sample is not None, "the strategy has no function to call otherwise"
        sample.means.append(_sum_of_squares([_norm(gradient) for gradient in gradients]))
        sample.cost_s += time.perf_counter() - start


def why_not_measured(mode: NoiseScaleMode, strategy: Strategy, ranks: int, micro_batches: int) -> str | None:
    """Return a sentence that says why the noise scale of a run is not measured; None if it is.

    `ranks` train, each with so many `micro_batches` per step.
    """
    if mode == "off":
        return "It was not measured (--noise-scale off)."
    if ranks * micro_batches == 1:
        return "One rank without micro-batches has a single gradient per step; use --accumulate 2 or more."
    if not strategy.lockstep:
        return f"Under {strategy.name}, ranks do not step together, so none has the mean gradient of a batch."
    if not strategy.exchanges and ranks > 1:
        return f"Under {strategy.name}, ranks do not exchange gradients, so none has their mean."
    return strategy.why_no_mean() if isinstance(strategy, MayLackMean) else None


def _norm(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient, summed in float32 or more."""
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    small = gradient.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32 if small else None)
    return norm


def _sum_of_squares(norms: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of some norms, in float64, on their device."""
    device = norms[0].device
    squares: Tensor = torch.stack([norm.to(device) for norm in norms]).double().square()
    return squares.sum()
