"""Check of a model before training: one forward and backward pass, to report problems early."""

from __future__ import annotations

import traceback

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.errors import PacelineError, WorkloadError
from paceline.strategies.base.strategy import no_gradient_error
from paceline.training.precision import autocast
from paceline.workloads.batches import Source
from paceline.workloads.workload import Workload


def check_gradients(model: nn.Module, workload: Workload, source: Source, config: RunConfig, rank: int) -> None:
    """Raise an error that names the parameters without a gradient, found by one backward pass on two samples.

    The check changes nothing: gradients, buffers and random number generators are restored.
    """
    if config.allow_unused:
        return
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    device = source.share.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            batch = source.peek(2)
            if batch is None:
                return
            with autocast(config.precision, device):
                outcome = workload.forward(model, batch)
            _check_loss(outcome.loss)
            workload.count_correct(outcome)
            outcome.loss.backward()
        except PacelineError:
            raise
        except Exception as error:
            raise WorkloadError(
                f"the model failed on its first batch: {type(error).__name__}: {error}",
                hint="see the traceback above; the check runs the model on two samples",
                detail=traceback.format_exc().rstrip(),
            ) from None
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in kept and kept[name].shape == buffer.shape:  # The pass may have made others, such as caches.
                buffer.copy_(kept[name])
    if missing:
        raise no_gradient_error(missing, rank)


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise WorkloadError(
            f"the loss is {found}, not a scalar tensor.",
            hint="return the mean over the samples, as reduction='mean' does",
        )
