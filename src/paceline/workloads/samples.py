"""Samples of a data set, by index: images, tensors, or any data set with a length and an index."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from paceline.comm.messages.nested_tensors import tensors_in
from paceline.errors import PacelineError, WorkloadError
from paceline.formatting import join_names
from paceline.workloads.data.images import ImageSet
from paceline.workloads.gpu_copy import fits_on_gpu


class Samples(ABC):
    """Samples of a data set."""

    @abstractmethod
    def batch(self, indices: Tensor, epoch: int | None) -> Any:
        """Return a batch of samples; without augmentation by Paceline if `epoch` is None."""

    @abstractmethod
    def read(self, index: int) -> Any:
        """Return one sample as the data set has it."""

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Tensors that hold all samples along their first dimension; empty if samples are made one by one."""
        return ()


class ImageSamples(Samples):
    """Images of a built-in data set, on the device of the run."""

    def __init__(
        self, images: ImageSet, seed: int, device: torch.device, dtype: torch.dtype, *, channels_last: bool
    ) -> None:
        self._images = images.to(device)
        self._seed = seed
        self._format: dict[str, Any] = {"dtype": dtype, "channels_last": channels_last}

    def batch(self, indices: Tensor, epoch: int | None) -> Any:
        return self._images.batch(indices, seed=self._seed, epoch=epoch, **self._format)

    def read(self, index: int) -> Any:
        return self._images.images[index], self._images.labels[index]

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return self._images.images, self._images.labels


class TensorSamples(Samples):
    """Tensors with the samples along their first dimension."""

    def __init__(self, tensors: Tensor | tuple[Tensor, ...]) -> None:
        self._tensors = tensors

    def batch(self, indices: Tensor, epoch: int | None) -> Any:  # noqa: ARG002
        return self.read(indices)

    def read(self, index: int | Tensor) -> Any:
        if isinstance(self._tensors, Tensor):
            return self._tensors[index]
        return tuple(tensor[index] for tensor in self._tensors)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return (self._tensors,) if isinstance(self._tensors, Tensor) else self._tensors


class DatasetSamples(Samples):
    """Samples of the user's data set, read one by one and collated."""

    def __init__(self, dataset: Any, collate: Any = default_collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def batch(self, indices: Tensor, epoch: int | None) -> Any:  # noqa: ARG002
        wanted = indices.tolist()
        samples = self._read(wanted)
        try:
            return self._collate(samples)
        except PacelineError:
            raise
        except Exception as error:
            raise _collate_error(wanted, samples, error) from None

    def read(self, index: int) -> Any:
        return self._read([index])[0]

    def _read(self, indices: list[int]) -> Sequence[Any]:
        samples: list[Any] = []
        try:
            if hasattr(self._dataset, "__getitems__"):
                return self._dataset.__getitems__(indices)  # type: ignore[no-any-return]
            for index in indices:
                samples.append(self._dataset[index])
        except PacelineError:
            raise
        except Exception as error:
            at_once = hasattr(self._dataset, "__getitems__") and len(indices) > 1
            where = f"samples {_some(indices)}" if at_once else f"sample {indices[len(samples)]}"
            raise WorkloadError(
                f"reading {where} of the data set failed: {type(error).__name__}: {error}",
                hint="correct the data set; the traceback above shows where it failed",
                detail=traceback.format_exc().rstrip(),
            ) from None
        return samples


def samples_of(data: Any, seed: int, device: torch.device, dtype: torch.dtype, *, channels_last: bool) -> Samples:
    """Return the samples of data with a length and an index."""
    if isinstance(data, ImageSet):
        return ImageSamples(data, seed, device, dtype, channels_last=channels_last)
    if isinstance(data, DataLoader):
        return DatasetSamples(data.dataset, data.collate_fn)
    if type(data) is TensorDataset:  # Not a subclass, which may define its own index.
        data = data.tensors
    if not isinstance(data, Tensor | tuple):
        return DatasetSamples(data)
    if device.type == "cuda" and fits_on_gpu(list(tensors_in(data)), device):
        data = data.to(device) if isinstance(data, Tensor) else tuple(column.to(device) for column in data)
    return TensorSamples(data)


def _collate_error(indices: list[int], samples: Sequence[Any], error: Exception) -> WorkloadError:
    """Return the error for samples that do not form a batch, with two whose tensors differ in shape."""
    shapes = [[tuple(tensor.shape) for tensor in _tensors_of(sample)] for sample in samples]
    other = next((at for at, own in enumerate(shapes) if own != shapes[0]), None)
    if other is None:
        return WorkloadError(
            f"collating samples {_some(indices)} failed: {type(error).__name__}: {error}",
            hint="correct the data set or its collate_fn; the traceback above shows where it failed",
            detail=traceback.format_exc().rstrip(),
        )
    one, two = (", ".join(str(shape) for shape in shapes[at]) or "no tensor" for at in (0, other))
    return WorkloadError(
        f"samples {indices[0]} and {indices[other]} do not form a batch: their shapes are {one} and {two}.",
        hint="return samples of one shape, or use a DataLoader with a collate_fn that pads them",
    )


def _tensors_of(sample: Any) -> list[Any]:
    """Return the tensors of a sample, and its arrays."""
    parts = sample if isinstance(sample, list | tuple) else [sample]
    arrays = [part for part in parts if hasattr(part, "shape") and not isinstance(part, Tensor)]
    return [*tensors_in(sample), *arrays]


def _some(indices: list[int]) -> str:
    names = [str(index) for index in indices]
    return join_names(names if len(names) <= 3 else [*names[:2], "others"])
