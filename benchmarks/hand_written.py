"""Training of a model as one would write it by hand, in a few lines: nothing of it is Paceline's but the model.

Images stay on the device, normalised and padded. Each batch is drawn at random, cropped and mirrored sample by sample.
The step is that of a usual loop in bf16, or the same step as one CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD = 4
"""Pixels that images are padded with on each side, for random crops."""


class HandWritten:
    """A model in a loop of a few lines, with or without one CUDA graph of the whole step."""

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        batch: int,
        *,
        graph: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        """Train `model` on normalised images [N, C, H, W], and labels, on the device of the labels."""
        self._device = labels.device
        self._model = model.to(self._device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True
        )
        self._padded = F.pad(images.to(self._device), [PAD] * 4).permute(0, 2, 3, 1).contiguous()
        self._labels, self._batch, self._size = labels, batch, images.shape[-1]
        self._label_smoothing = label_smoothing
        self._batches = self._endless_batches()
        self._loss = torch.zeros((), device=self._device)
        self._correct = torch.zeros((), device=self._device, dtype=torch.int64)
        self._replay: Callable[[], None] | None = None
        if graph:
            self._capture()

    def train(self, steps: int) -> float:
        """Train some steps; return the seconds that they took."""
        began_s = time.perf_counter()
        for _ in range(steps):
            images, labels = next(self._batches)
            if self._replay is None:
                self._step(images, labels)
                continue
            self._static_images.copy_(images)
            self._static_labels.copy_(labels)
            self._replay()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began_s

    def _endless_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            order = torch.randperm(len(self._labels), device=self._device)
            for chosen in order.split(self._batch):
                if len(chosen) == self._batch:  # A graph has one size of batch.
                    yield self._augmented(chosen), self._labels[chosen]

    def _augmented(self, chosen: Tensor) -> Tensor:
        """Crop each image at its own offset, and mirror half of them."""
        top, left = torch.randint(0, 2 * PAD + 1, (2, len(chosen), 1), device=self._device)
        pixels = torch.arange(self._size, device=self._device)
        mirrored = torch.rand(len(chosen), 1, device=self._device) < 0.5
        rows, columns = top + pixels, left + torch.where(mirrored, pixels.flip(0), pixels)
        return self._padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    def _step(self, images: Tensor, labels: Tensor) -> None:
        with torch.autocast(self._device.type, torch.bfloat16, cache_enabled=self._replay is None):
            outputs = self._model(images)
            loss = F.cross_entropy(outputs, labels, label_smoothing=self._label_smoothing)
        self._loss += loss.detach()
        self._correct += (outputs.argmax(1) == labels).sum()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _capture(self) -> None:
        images, labels = next(self._batches)
        self._static_images, self._static_labels = images.clone(), labels.clone()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self._replay = graph.replay  # From here on, autocast keeps no casts.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step(self._static_images, self._static_labels)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            self._step(self._static_images, self._static_labels)
