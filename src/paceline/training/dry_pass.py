"""A pass and an update before the first step that change nothing, to compile a model or to load a GPU's kernels."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import torch

from paceline.config import RunConfig
from paceline.training.precision import autocast
from paceline.training.sync import Sync
from paceline.workloads.batches import Source
from paceline.workloads.random_state import kept_random_state
from paceline.workloads.sampler import split
from paceline.workloads.workload import Workload


class Forms(Protocol):
    """Forms of micro-batches for which there is compiled code."""

    def context(self, batch: Any) -> AbstractContextManager[Any]:
        """Return the context for the forward pass of a micro-batch."""


def dry_pass(config: RunConfig, workload: Workload, sync: Sync, source: Source, forms: Forms | None = None) -> bool:
    """Run forward and backward on a micro-batch as long as that of a step; wait for the device.

    Return False if that cannot be: reading the data would consume it, or the strategy cannot accumulate gradients, so
    that each backward pass needs a step. Called on all ranks.
    """
    if source.batch is None or "accumulate" not in sync.strategy.supports:
        return False
    share = source.share
    own = split(source.batch, share.workers)[share.rank]
    batch = source.peek(len(split(len(own), config.accumulate)[0]))
    if batch is None:
        return False
    with kept_random_state(share.device):
        _pass(config, workload, sync, batch, forms)
    if share.device.type == "cuda":
        torch.cuda.synchronize(share.device)
    return True


def _pass(config: RunConfig, workload: Workload, sync: Sync, batch: Any, forms: Forms | None) -> None:
    """Run forward and backward, and restore gradients and buffers."""
    model, stopwatch = sync.strategy.model, sync.comm.stopwatch
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    without = [parameter for parameter in model.parameters() if parameter.grad is None]
    if stopwatch is not None:
        stopwatch.begin()
    try:
        with sync.microbatch(last=False):
            # Compiled code contains its casts, and depends on whether autocast keeps them.
            with (
                autocast(config.precision, sync.comm.device, keeps_casts=forms is None),
                nullcontext() if forms is None else forms.context(batch),
            ):
                loss = workload.forward(sync.model, batch).loss
            loss.backward()
    finally:
        if stopwatch is not None:
            stopwatch.drop()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            for buffer, before in buffers:
                buffer.copy_(before)
    for parameter in without:
        parameter.grad = None


def dry_update(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Update a copy of the weights by a copy of the optimiser, without gradients that matter; wait for the device.

    What cannot be copied, or cannot be stepped like this, is left alone. The first step then loads its kernels.
    """
    with suppress(Exception), kept_random_state(device):
        twin = copy.deepcopy(optimizer)
        for group in twin.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        twin.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
