"""Tests of cross-entropy with label smoothing, against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.workloads.label_smoothing import smoothed_cross_entropy
from paceline.workloads.workload import Workload

LABELS = torch.randint(10, (33,), generator=torch.Generator().manual_seed(1))


def _logits(dtype: torch.dtype) -> Tensor:
    logits = torch.randn(33, 10, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    return logits.requires_grad_()


@pytest.mark.parametrize("smoothing", [0.1, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient_are_those_of_torch(dtype: torch.dtype, smoothing: float) -> None:
    ours, theirs = _logits(dtype), _logits(dtype)
    loss, expected = (
        smoothed_cross_entropy(ours, LABELS, smoothing),
        F.cross_entropy(theirs, LABELS, label_smoothing=smoothing),
    )
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_loss_is_as_precise_under_autocast() -> None:
    ours, theirs = _logits(torch.bfloat16), _logits(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = (
            smoothed_cross_entropy(ours, LABELS, 0.1),
            F.cross_entropy(theirs, LABELS, label_smoothing=0.1),
        )
    assert loss.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


class _Count(TorchDispatchMode):
    """Counter of operations."""

    operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += 1
        return function(*args, **(kwargs or {}))


def test_it_takes_fewer_operations() -> None:
    counts = []
    for loss in (
        lambda logits: smoothed_cross_entropy(logits, LABELS, 0.1),
        lambda logits: F.cross_entropy(logits, LABELS, label_smoothing=0.1),
    ):
        with _Count() as count:
            loss(_logits(torch.float32)).backward()
        counts.append(count.operations)
    assert counts[0] <= counts[1] - 8


def test_labels_of_a_user_s_data_may_be_left_out() -> None:
    """As torch's function leaves them out."""
    images, labels = torch.randn(4, 10), torch.tensor([1, -100, 3, 4])
    workload = Workload(model=nn.Identity(), train=(images, labels), loss=F.cross_entropy, label_smoothing=0.1)
    loss = workload.forward(workload.model, (images, labels)).loss
    torch.testing.assert_close(loss, F.cross_entropy(images[[0, 2, 3]], labels[[0, 2, 3]], label_smoothing=0.1))
