"""Graphs of forward and backward passes, one pair for each form that a micro-batch has."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.messages.nested_tensors import tensors_in
from paceline.training.graphs.capture import CaptureError, Capturer, Replay, capturing
from paceline.workloads.batches import map_batch
from paceline.workloads.workload import ForwardResult

Forward = Callable[[Any], tuple[ForwardResult, Tensor | None]]
"""Function from a batch to the result of the forward pass and the number of correct predictions, None if unknown."""


class StaticGradients:
    """Memory of the gradients of all trained parameters, which graphs write and read: it never moves.

    It is that of the first backward pass that was captured. Other passes copy or add their gradients to it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.tensors: list[Tensor] = []

    def attach(self) -> None:
        """Make them the gradients of the parameters."""
        for parameter, gradient in zip(self.parameters, self.tensors, strict=True):
            parameter.grad = gradient

    def detach(self) -> None:
        """Leave the parameters without a gradient, as a step without graphs expects them."""
        for parameter in self.parameters:
            parameter.grad = None

    def collect(self, *, add: bool) -> None:
        """Keep, copy or add the gradients of a backward pass that began without any, then attach."""
        missing = [number for number, parameter in enumerate(self.parameters) if parameter.grad is None]
        if missing:
            raise CaptureError(f"{len(missing)} of {len(self.parameters)} parameters got no gradient.")
        fresh = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not self.tensors:
            assert not add, "the first micro-batch of a step is captured first"
            self.tensors = fresh
            return
        with torch.no_grad():
            (torch._foreach_add_ if add else torch._foreach_copy_)(self.tensors, fresh)
        self.attach()


class PassGraphs:
    """Forward and backward of a micro-batch of one form, as two graphs, so that each can be timed."""

    def __init__(
        self,
        capturer: Capturer,
        forward: Forward,
        gradients: StaticGradients,
        batch: Any,
        *,
        weight: float,
        is_first: bool,
    ) -> None:
        """Capture the passes of micro-batches like `batch`; those that are not the first of a step add gradients.

        They are rehearsed before, which changes buffers of the model and random number generators.
        """
        self._inputs = map_batch(batch, torch.clone)
        device = gradients.parameters[0].device
        self.figures = torch.zeros(2, dtype=torch.float64, device=device)
        """Loss and number of correct predictions of the last pass."""
        self.counts_correct = False
        self._loss: Tensor | None = None
        with capturing("the forward pass"):
            capturer.rehearse(lambda: self._capture_forward(forward, weight))
        with capturing("the backward pass"):
            capturer.rehearse(lambda: self._rehearse_backward(gradients))
        with capturing("the forward pass"):
            self.forward = capturer.capture(lambda: self._capture_forward(forward, weight))
        with capturing("the backward pass"):
            self.backward: Replay = capturer.capture(lambda: self._capture_backward(gradients, is_first))

    def load(self, batch: Any) -> None:
        """Copy a batch of the same form to where the graphs read it."""
        for static, tensor in zip(tensors_in(self._inputs), tensors_in(batch), strict=True):
            static.copy_(tensor, non_blocking=True)

    def _capture_forward(self, forward: Forward, weight: float) -> None:
        outcome, correct = forward(self._inputs)
        self.counts_correct = correct is not None
        with torch.no_grad():
            self.figures[0].copy_(outcome.loss)
            if correct is not None:
                self.figures[1].copy_(correct)
        self._loss = outcome.loss if weight == 1 else outcome.loss * weight

    def _rehearse_backward(self, gradients: StaticGradients) -> None:
        loss, self._loss = self._loss, None
        assert loss is not None, "the forward pass was rehearsed before"
        gradients.detach()
        loss.backward()
        gradients.detach()

    def _capture_backward(self, gradients: StaticGradients, is_first: bool) -> None:
        loss, self._loss = self._loss, None
        assert loss is not None, "the forward pass was captured before"
        gradients.detach()
        loss.backward()
        gradients.collect(add=not is_first)


def form_of_tensors(batch: Any) -> Hashable:
    """Return a key that is equal for batches whose tensors have the same form, whatever else they contain."""
    return tuple(form_of(tensor) for tensor in tensors_in(batch))


def form_of(batch: Any) -> Hashable:
    """Return a key that is equal for batches whose tensors have the same form and whose other values are equal."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype, batch.stride()
    if isinstance(batch, Mapping):
        return tuple((key, form_of(value)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch), tuple(form_of(value) for value in batch)
    if not isinstance(batch, Hashable):
        raise CaptureError(f"a batch contains a {type(batch).__name__}, which is not a tensor.")
    return batch
