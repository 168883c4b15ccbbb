"""Tests of captures on a GPU: what cannot be captured is found, and does no harm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.training.graphs.capture import CaptureError, CudaCapturer, capturing

pytestmark = pytest.mark.gpu
SIZE = 25_000_000
"""Elements of a tensor of 100 MB."""


def test_a_rehearsal_refuses_to_wait_for_the_device_and_runs_the_rest() -> None:
    device = torch.device("cuda", 0)
    capturer, x = CudaCapturer(device), torch.ones(4, device=device)
    with pytest.raises(RuntimeError, match="synchroniz"):
        capturer.rehearse(lambda: x.sum().item())
    assert torch.cuda.get_sync_debug_mode() == 0
    capturer.rehearse(lambda: x.add_(1))
    assert x.tolist() == [2, 2, 2, 2]


def test_a_failed_capture_leaves_nothing_behind() -> None:
    device = torch.device("cuda", 0)
    capturer, x, stream = CudaCapturer(device), torch.ones(4, device=device), torch.cuda.current_stream(device)

    def work() -> None:
        x.add_(1)
        torch.cuda.synchronize(device)

    with pytest.raises(CaptureError, match="the work cannot be captured"), capturing("the work"):
        capturer.capture(work)
    assert torch.cuda.current_stream(device) == stream
    assert x.tolist() == [1, 1, 1, 1]
    F.dropout(torch.ones(100, device=device))  # It raises while a generator still belongs to a capture.
    other = torch.cuda.Stream(device)
    for _ in range(5):  # While a capture is underway, such memory is never used again.
        torch.empty(SIZE, device=device).record_stream(other)
    torch.cuda.synchronize(device)
    reserved = torch.cuda.memory_reserved(device)
    for _ in range(20):
        torch.empty(SIZE, device=device).record_stream(other)
        torch.cuda.synchronize(device)
    assert torch.cuda.memory_reserved(device) <= reserved + 4 * SIZE
    replay = capturer.capture(lambda: x.add_(1))
    replay()
    assert x.tolist() == [2, 2, 2, 2]
