"""One step on one rank: forward and backward passes of its micro-batches, synchronisation, update."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.config import RunConfig
from paceline.measure.steps import BACKWARD, DATA, FORWARD, OPTIMISER
from paceline.training.compiled import CompiledForms, compile_now
from paceline.training.dry_pass import dry_pass, dry_update
from paceline.training.precision import autocast
from paceline.training.recording.recording import Recording
from paceline.training.sync import Sync
from paceline.workloads.batches import MicroBatch, Source
from paceline.workloads.workload import Workload


class TrainingStep:
    """Step of a run whose operations the host starts one by one."""

    def __init__(
        self,
        config: RunConfig,
        workload: Workload,
        sync: Sync,
        source: Source,
        recording: Recording,
        scaler: GradScaler | None,
    ) -> None:
        self.config = config
        self.workload = workload
        self.sync = sync
        self.source = source
        self.stopwatch = recording.stopwatch
        self.recorder = recording.step_recorder
        self.recording = recording
        self.scaler = scaler
        self.model: nn.Module = sync.model
        """Module that a forward pass calls."""
        self.compiled = CompiledForms() if config.compile else None
        """Micro-batches for which the model is compiled; None if it is not compiled."""

    def prepare(self) -> float | None:
        """Compile the model before the first step; return the seconds it took, None if it was not done.

        On a GPU, kernels that are not compiled are loaded, which takes longer than many steps.
        """
        compile_s, device = None, self.source.share.device
        if self.compiled is not None:
            compile_s = compile_now(self.config, self.workload, self.sync, self.source, self.compiled)
        elif device.type == "cuda":
            with suppress(torch.OutOfMemoryError):  # The first step will say what it needs.
                dry_pass(self.config, self.workload, self.sync, self.source)
        if device.type == "cuda":
            dry_update(self.sync.optimizer, device)
        return compile_s

    def forward_context(self, batch: Any) -> AbstractContextManager[Any]:
        """Return the context for the forward pass of a micro-batch that decides whether compiled code is used."""
        return nullcontext() if self.compiled is None else self.compiled.context(batch)

    def between_windows(self) -> None:
        """Prepare the next steps, while no time is measured; called on all ranks."""

    def run(self, micro_batches: list[MicroBatch]) -> bool:
        """Train a step that the stopwatch has begun; return whether its update was skipped."""
        if self.scaler is not None:  # It may skip the step, whose statistics are not finite either.
            self.sync.buffers.keep()
        for number, micro_batch in enumerate(micro_batches, start=1):
            self.run_pass(micro_batch, self.source.fetch(micro_batch), last=number == len(micro_batches))
        return self.update()

    def run_pass(self, micro_batch: MicroBatch, batch: Any, *, last: bool) -> Tensor:
        """Run forward and backward of a micro-batch that was just fetched as `batch`; return its loss."""
        stopwatch = self.stopwatch
        stopwatch.lap(DATA)
        self.sync.noise.begin_micro_batch(micro_batch.samples, micro_batch.weight)
        with self.sync.microbatch(last=last):
            # Compiled code contains its casts, and depends on whether autocast keeps them, as graphs do not let it.
            keeps_casts = self.compiled is None
            with (
                autocast(self.config.precision, self.source.share.device, keeps_casts=keeps_casts),
                self.forward_context(batch),
            ):
                outcome = self.workload.forward(self.model, batch)
            self.recorder.add_micro_batch(micro_batch.samples, outcome.loss, self.workload.count_correct(outcome))
            stopwatch.lap(FORWARD)
            loss = outcome.loss if micro_batch.weight == 1 else outcome.loss * micro_batch.weight
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            stopwatch.watch_backward(loss)
            loss.backward()
            stopwatch.lap(BACKWARD)
        return outcome.loss.detach()

    def update(self) -> bool:
        """Synchronise gradients and update the weights; return whether that was skipped."""
        sync, skipped_before = self.sync, self.sync.skipped_steps
        sync.noise.end_backward(self.scaler)
        sync.step(self.config.clip_norm, self.scaler)
        is_skipped = sync.skipped_steps > skipped_before
        if is_skipped and self.scaler is not None:
            sync.buffers.restore()
        self.stopwatch.lap(OPTIMISER)
        if self.compiled is not None:
            self.compiled.end_step()
        return is_skipped

    def close(self) -> None:
        """Release what the step holds; called after the last one."""
