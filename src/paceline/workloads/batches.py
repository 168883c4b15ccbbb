"""Sources of batches: split any kind of training data into this rank's micro-batches of each global batch.

A micro-batch has a weight. The gradient of its mean loss times the weight, averaged over the ranks, is the mean over
all samples of the global batch, even if the ranks have different numbers of samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from paceline.comm.nested_tensors import tensors_in
from paceline.errors import UsageError, WorkloadError
from paceline.workloads.data.images import ImageSet
from paceline.workloads.sampler import Sampler, epoch_key, split


@dataclass(frozen=True)
class Share:
    """This rank's share of a global batch, and the device and format that it is moved to."""

    rank: int
    workers: int
    micro_batches_per_step: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    def ranges(self, total: int, rank: int | None = None) -> list[range]:
        """Return the positions of each micro-batch of this rank (or of `rank`) in a global batch of `total` samples."""
        own = split(total, self.workers)[self.rank if rank is None else rank]
        return [own[part.start : part.stop] for part in split(len(own), self.micro_batches_per_step)]

    def to_device(self, batch: Any) -> Any:
        """Move a batch to the device, in the dtype and memory format of the run."""
        return _map_tensors(batch, self._tensor_to_device)

    def _tensor_to_device(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else None
        images = self.channels_last and tensor.dim() == 4
        layout = torch.channels_last if images else torch.preserve_format
        return tensor.to(self.device, dtype, non_blocking=True, memory_format=layout)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of one rank, not yet fetched."""

    samples: int
    weight: float
    """Samples × workers ÷ samples of the global batch."""
    epoch: int | None
    """None in evaluation, where nothing is augmented."""
    content: Any
    """Indices into a data set, or the batch itself."""


MicroBatchesOfRank = Callable[[int], list[MicroBatch]]
"""Function from a rank to its micro-batches in one step."""


class Source(ABC):
    """Source of this rank's micro-batches of every step."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self._splits: dict[tuple[int, int], list[tuple[range, int, float]]] = {}

    @abstractmethod
    def steps_per_epoch(self) -> int | None:
        """Return the steps in an epoch; None if the length of the data is unknown."""

    @property
    def expected_steps(self) -> int | None:
        """Steps in an epoch, if only estimated: used to show progress."""
        return self.steps_per_epoch()

    @property
    def dropped(self) -> int:
        """Samples that an epoch drops, as far as known in advance."""
        return 0

    @property
    def batch(self) -> int | None:
        """Samples in a global batch; None if the data determines it."""
        return None

    @property
    def samples(self) -> int | None:
        """Total number of samples; None if the length of the data is unknown."""
        return None

    @abstractmethod
    def global_steps(self, epoch: int | None) -> Iterator[MicroBatchesOfRank]:
        """Yield, for each step of an epoch, a function that returns any rank's micro-batches of it."""

    def epoch(self, epoch: int | None) -> Iterator[list[MicroBatch]]:
        """Yield this rank's micro-batches of each step of an epoch."""
        for micro_batches_of in self.global_steps(epoch):
            yield micro_batches_of(self.share.rank)

    @abstractmethod
    def fetch(self, micro_batch: MicroBatch) -> Any:
        """Return the batch itself, on the device."""

    @abstractmethod
    def peek(self, samples: int) -> Any | None:
        """Return a batch of a few samples for a test of the model; None if fetching would consume the data."""

    def _split_batch(self, total: int, epoch: int | None, take: Callable[[range], Any]) -> MicroBatchesOfRank:
        """Return a function that splits a global batch of `total` samples.

        `take` returns the samples at the given positions of the batch.
        """

        def micro_batches_of(rank: int) -> list[MicroBatch]:
            if (total, rank) not in self._splits:  # Cached, since nearly every batch has the same size.
                parts = [part for part in self.share.ranges(total, rank) if len(part)]
                weighted = [(part, len(part), len(part) * self.share.workers / total) for part in parts]
                self._splits[total, rank] = weighted
            return [
                MicroBatch(samples, weight, epoch, take(part)) for part, samples, weight in self._splits[total, rank]
            ]

        return micro_batches_of


class IndexedSource(Source):
    """Source for a data set with a length and an index."""

    def __init__(
        self,
        fetch: Callable[[Tensor, int | None], Any],
        sampler: Sampler,
        share: Share,
        indices_on: torch.device | None = None,
    ) -> None:
        super().__init__(share)
        self._fetch = fetch
        self._sampler = sampler
        self._indices_on = indices_on

    def steps_per_epoch(self) -> int:
        return self._sampler.steps

    @property
    def dropped(self) -> int:
        return self._sampler.dropped

    @property
    def batch(self) -> int:
        return self._sampler.batch

    @property
    def samples(self) -> int:
        return self._sampler.size

    def global_steps(self, epoch: int | None) -> Iterator[MicroBatchesOfRank]:
        for batch in self._sampler.batches(epoch or 0, self._indices_on):
            yield self._split_batch(len(batch), epoch, lambda part, batch=batch: batch[part.start : part.stop])  # type: ignore[misc]

    def fetch(self, micro_batch: MicroBatch) -> Any:
        return self._fetch(micro_batch.content, micro_batch.epoch)

    def peek(self, samples: int) -> Any | None:
        return self._fetch(torch.arange(min(samples, self._sampler.size)), 0)


class LoaderSource(IndexedSource):
    """Source for a DataLoader with worker processes, which fetch, collate and pin as configured, at our indices."""

    def __init__(self, loader: DataLoader[Any], sampler: Sampler, share: Share) -> None:
        super().__init__(_make_fetch(loader, share, sampler.seed), sampler, share)
        self._indices: list[list[int]] = []
        self._loader = DataLoader(
            loader.dataset,
            batch_sampler=_PresetBatchSampler(self._indices),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=True,  # Restarting them in each epoch would count as part of a step's time.
        )

    def global_steps(self, epoch: int | None) -> Iterator[MicroBatchesOfRank]:  # noqa: ARG002
        raise UsageError(
            "a DataLoader with workers loads ahead, but under this strategy ranks receive their samples step by step.",
            hint="use num_workers=0, or a strategy under which ranks step together",
        )

    def epoch(self, epoch: int | None) -> Iterator[list[MicroBatch]]:
        steps = [micro_batches_of(self.share.rank) for micro_batches_of in super().global_steps(epoch)]
        self._indices[:] = [micro_batch.content.tolist() for micro_batches in steps for micro_batch in micro_batches]
        fetched = iter(self._loader)
        for micro_batches in steps:
            yield [replace(micro_batch, content=next(fetched)) for micro_batch in micro_batches]

    def fetch(self, micro_batch: MicroBatch) -> Any:
        return self.share.to_device(micro_batch.content)


class _PresetBatchSampler:
    """Batch sampler whose batches are set before each epoch."""

    def __init__(self, batches: list[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(self._batches))

    def __len__(self) -> int:
        return len(self._batches)


class StreamSource(Source):
    """Source for an iterable of global batches: every rank iterates over it and takes its share of each batch."""

    def __init__(self, batches: Iterable[Any], share: Share, seed: int) -> None:
        super().__init__(share)
        self._batches = batches
        self._seed = seed

    def steps_per_epoch(self) -> None:
        return None

    @property
    def expected_steps(self) -> int | None:
        return len(self._batches) if isinstance(self._batches, Sized) else None

    def global_steps(self, epoch: int | None) -> Iterator[MicroBatchesOfRank]:
        if epoch is not None and hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(epoch)
        smallest = self.share.workers * self.share.micro_batches_per_step if epoch is not None else 1
        for batch in _iterate_with_rng(self._batches, epoch_key(self._seed, epoch or 0)):
            total = _batch_size(batch)
            if total >= smallest:
                yield self._split_batch(total, epoch, lambda part, batch=batch: _slice(batch, part))  # type: ignore[misc]

    def fetch(self, micro_batch: MicroBatch) -> Any:
        return self.share.to_device(micro_batch.content)

    def peek(self, samples: int) -> Any | None:
        if iter(self._batches) is self._batches:
            return None
        batch = next(iter(self._batches), None)
        return None if batch is None else self.share.to_device(_slice(batch, range(min(samples, _batch_size(batch)))))


def _iterate_with_rng(batches: Iterable[Any], key: int) -> Iterator[Any]:
    """Iterate with a separate random state, so that an iterable that shuffles does so equally on all ranks."""
    state, end = torch.Generator().manual_seed(key).get_state(), object()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        iterator = iter(batches)
        state = torch.get_rng_state()
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            batch = next(iterator, end)
            state = torch.get_rng_state()
        if batch is end:
            return
        yield batch


def make_source(
    data: Any, share: Share, *, batch: int, seed: int, reshuffle: bool = True, train: bool = True
) -> Source:
    """Return the source for a data set, tensors, a DataLoader or an iterable of global batches."""
    smallest = share.workers * share.micro_batches_per_step if train else 1
    if not _is_indexable(data):
        return StreamSource(data, share, seed)
    size = _dataset_size(data)
    if size < smallest:
        raise UsageError(
            f"{size} training samples are too few for {share.workers} ranks × "
            f"{share.micro_batches_per_step} micro-batches."
            if train
            else "the test data is empty.",
            hint="use fewer ranks or more samples" if train else "provide test samples, or set test=None",
        )
    sampler = Sampler(size, batch, seed, shuffle=train, reshuffle=reshuffle, smallest=smallest)
    if isinstance(data, DataLoader) and data.num_workers > 0:
        return LoaderSource(data, sampler, share)
    return IndexedSource(
        _make_fetch(data, share, seed), sampler, share, share.device if isinstance(data, ImageSet) else None
    )


def _make_fetch(data: Any, share: Share, seed: int) -> Callable[[Tensor, int | None], Any]:
    """Return a function that fetches the samples of given indices to the device."""
    if isinstance(data, ImageSet):
        images = data.to(share.device)
        return lambda indices, epoch: images.batch(
            indices, seed=seed, epoch=epoch, dtype=share.dtype, channels_last=share.channels_last
        )
    if isinstance(data, Tensor):
        return lambda indices, _: share.to_device(data[indices])
    if type(data) is TensorDataset:  # Not a subclass, which may define its own index.
        data = data.tensors
    if isinstance(data, tuple):
        return lambda indices, _: share.to_device(tuple(tensor[indices] for tensor in data))
    dataset, collate = (data.dataset, data.collate_fn) if isinstance(data, DataLoader) else (data, default_collate)
    if hasattr(dataset, "__getitems__"):
        return lambda indices, _: share.to_device(collate(dataset.__getitems__(indices.tolist())))
    return lambda indices, _: share.to_device(collate([dataset[index] for index in indices.tolist()]))


def _is_indexable(data: Any) -> bool:
    """Whether `data` is a data set of samples. A list is an iterable of batches, a tuple holds tensors of samples."""
    if isinstance(data, DataLoader):  # Its data set holds samples, even a list, unless it is iterable only.
        return hasattr(data.dataset, "__len__") and not isinstance(data.dataset, IterableDataset)
    if isinstance(data, tuple):
        return all(isinstance(member, Tensor) for member in data)
    if isinstance(data, ImageSet):
        return True
    if isinstance(data, IterableDataset):  # It may have a length, but its inherited index only raises.
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list)


def _dataset_size(data: Any) -> int:
    if isinstance(data, tuple):
        return len(data[0])
    return len(data.dataset) if isinstance(data, DataLoader) else len(data)  # type: ignore[arg-type]


def _map_tensors(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_map_tensors(value, change) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _batch_size(batch: Any) -> int:
    first = next(tensors_in(batch), None)
    if first is None or first.dim() == 0:
        raise WorkloadError(
            f"a batch of type {type(batch).__name__} has no tensor to count its samples by.",
            hint="use tensors, or tuples, lists or dicts of tensors, with the samples along the first dimension",
        )
    return len(first)


def _slice(batch: Any, part: range) -> Any:
    total = _batch_size(batch)
    return _map_tensors(
        batch, lambda tensor: tensor[part.start : part.stop] if tensor.dim() and len(tensor) == total else tensor
    )
