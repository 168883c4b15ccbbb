"""End of a run that has diverged: on all ranks alike, with the sample that is the cause, or with advice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.analysis.divergence import divergence_cause, divergence_place
from paceline.config import RunConfig
from paceline.errors import DivergenceError, WorkloadError
from paceline.formatting import join_names
from paceline.records.summary import Divergence
from paceline.strategies.base.scaling import why_no_scaler
from paceline.training.recording.windows import Windows
from paceline.training.sync import Sync
from paceline.workloads.batches import Source
from paceline.workloads.workload import Workload


@dataclass(frozen=True)
class DivergenceCheck:
    """Check of a run at the end of each window, when all ranks know the losses of its steps."""

    config: RunConfig
    workload: Workload
    sync: Sync
    source: Source
    windows: Windows

    def after_window(self) -> None:
        """Raise, on all ranks alike, if the loss of a step is not finite, or if too many steps in a row were skipped.

        If the data is the cause, the error names a sample.
        """
        divergence = self.windows.divergence.not_finite
        if divergence is None:
            return
        self._blame_data(divergence)
        place = divergence_place(divergence.step, self.config.seed)
        raise DivergenceError(f"the run diverged at {place}: {divergence_cause(divergence)}.", hint=self._hint())

    def _blame_data(self, divergence: Divergence) -> None:
        """Raise if a sample of the step of the divergence contains NaN or infinity."""
        step = divergence.step
        ends = [end for end in self.windows.epoch_ends if end <= step]
        found = self.source.find_sample(len(ends), step - max(ends, default=0), lambda values: ~values.isfinite())
        by_rank = self.sync.comm.control.gather(torch.tensor(-1 if found is None else found))
        sample = max(int(one) for one in by_rank)
        if sample >= 0:
            what = "gradients are" if divergence.skipped else "the loss is"
            raise WorkloadError(
                f"{what} not finite in step {step}, because sample {sample} of the training data contains NaN or "
                "infinity.",
                hint="remove such samples, or replace the values",
            )

    def _hint(self) -> str:
        """Return what may prevent the divergence."""
        # The samples of an iterable cannot be read again.
        data = "check the data for NaN; " if self.source.samples is None else ""
        own = self.workload.optimizer is not None
        ways = ["a lower learning rate in the workload's optimiser"] if own else ["a lower --lr"]
        ways += [] if self.workload.scheduler is not None or own else ["a longer --warmup-epochs"]
        ways += ["--clip-norm 1"] if "clip" in self.sync.strategy.supports else []
        can_skip = self.config.on_nan == "stop" and why_no_scaler(self.sync.strategy) is None
        skip = ", or skip such steps with --on-nan skip" if can_skip else ""
        return f"{data}use {join_names(ways, 'or')}{skip}"
