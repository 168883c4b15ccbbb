"""Rehearsal of a step before a run resumes, so that it goes on exactly as if it had never stopped.

Strategies prepare themselves in their first step: DDP, for example, rebuilds its buckets after it, and all-reduces of
other buckets add the same numbers in another order. A run that resumes at step 1,000 must not have its first step
there. So it makes one on a few samples, and loads the checkpoint after that.
"""

from __future__ import annotations

from paceline.training.sync import Sync
from paceline.workloads.batches import Source
from paceline.workloads.workload import Workload

SAMPLES = 4
"""Samples of the step: BatchNorm needs more than one."""


def rehearse_step(sync: Sync, workload: Workload, source: Source) -> None:
    """Make a step whose effect a checkpoint will overwrite; none if reading samples would consume the data."""
    batch = source.peek(SAMPLES)
    if batch is None or sync.ranks == 1:
        return
    stopwatch = sync.comm.stopwatch
    if stopwatch is not None:
        stopwatch.begin()
    with sync.microbatch(last=True):
        workload.forward(sync.model, batch).loss.backward()
    sync.step()
    sync.strategy.finish()
    if stopwatch is not None:
        stopwatch.drop()
