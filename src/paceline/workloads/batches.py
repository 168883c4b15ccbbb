"""Turns whatever the user trains on into this rank's micro-batches of each global batch.

A *piece* is one micro-batch of one rank: it knows its number of samples and its weight, the factor that makes the plain
mean over ranks of the losses' gradients the mean over all samples of the global batch, however uneven the shares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from paceline.errors import UsageError, WorkloadError
from paceline.workloads.data.images import ImageSet
from paceline.workloads.sampler import Sampler, epoch_key, split


@dataclass(frozen=True)
class Share:
    """Which part of a global batch is this rank's, and how it comes to the device."""

    rank: int
    workers: int
    micro_batches: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    def pieces(self, total: int, rank: int | None = None) -> list[range]:
        """The positions, in a global batch of `total`, of each of this rank's (or another's) micro-batches."""
        own = split(total, self.workers)[self.rank if rank is None else rank]
        return [own[part.start : part.stop] for part in split(len(own), self.micro_batches)]

    def place(self, batch: Any) -> Any:
        """Moves a batch to the device, in the precision of the run."""
        return _map_tensors(batch, self._place_tensor)

    def _place_tensor(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else None
        images = self.channels_last and tensor.dim() == 4
        layout = torch.channels_last if images else torch.preserve_format
        return tensor.to(self.device, dtype, non_blocking=True, memory_format=layout)


@dataclass(frozen=True, slots=True)
class Piece:
    """One micro-batch of one rank, not yet fetched."""

    samples: int
    weight: float
    """Its samples × workers ÷ samples of the global batch."""
    epoch: int | None
    """None in evaluation: nothing is augmented."""
    content: Any
    """Indices into a data set, or the batch itself."""


PiecesOf = Callable[[int], list[Piece]]
"""Gives the pieces of a step that are a rank's."""


class Source(ABC):
    """Gives this rank its pieces of every step."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self._parts: dict[tuple[int, int], list[tuple[range, int, float]]] = {}

    @abstractmethod
    def steps(self) -> int | None:
        """Steps in an epoch, or None where only going through it tells."""

    @property
    def expected_steps(self) -> int | None:
        """As `steps`, where a good guess will do: for showing progress."""
        return self.steps()

    @property
    def dropped(self) -> int:
        """Samples that an epoch leaves out, as far as known beforehand."""
        return 0

    @property
    def batch(self) -> int | None:
        """Samples in a global batch, or None where the data decides."""
        return None

    @property
    def samples(self) -> int | None:
        """Samples in all, or None where only going through it tells."""
        return None

    @abstractmethod
    def shares(self, epoch: int | None) -> Iterator[PiecesOf]:
        """For each step of an epoch, what gives the pieces of it that are any rank's."""

    def epoch(self, epoch: int | None) -> Iterator[list[Piece]]:
        """This rank's pieces of each step of an epoch."""
        for pieces_of in self.shares(epoch):
            yield pieces_of(self.share.rank)

    @abstractmethod
    def fetch(self, piece: Piece) -> Any:
        """The batch itself, on the device."""

    @abstractmethod
    def peek(self, samples: int) -> Any | None:
        """A batch of a few samples to try a model out on; None where taking it would use it up."""

    def _cut(self, total: int, epoch: int | None, take: Callable[[range], Any]) -> PiecesOf:
        """What gives a rank's pieces of a global batch of `total`; `take` gives what is at some positions of it."""

        def pieces_of(rank: int) -> list[Piece]:
            if (total, rank) not in self._parts:  # Nearly every batch has the same size.
                parts = [part for part in self.share.pieces(total, rank) if len(part)]
                weighted = [(part, len(part), len(part) * self.share.workers / total) for part in parts]
                self._parts[total, rank] = weighted
            return [Piece(samples, weight, epoch, take(part)) for part, samples, weight in self._parts[total, rank]]

        return pieces_of


class Indexed(Source):
    """A data set with a length and an index."""

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

    def steps(self) -> int:
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

    def shares(self, epoch: int | None) -> Iterator[PiecesOf]:
        for batch in self._sampler.batches(epoch or 0, self._indices_on):
            yield self._cut(len(batch), epoch, lambda part, batch=batch: batch[part.start : part.stop])  # type: ignore[misc]

    def fetch(self, piece: Piece) -> Any:
        return self._fetch(piece.content, piece.epoch)

    def peek(self, samples: int) -> Any | None:
        return self._fetch(torch.arange(min(samples, self._sampler.size)), 0)


class Loaded(Indexed):
    """A DataLoader with worker processes: it fetches, collates and pins as it was told, on our indices."""

    def __init__(self, loader: DataLoader[Any], sampler: Sampler, share: Share) -> None:
        super().__init__(_fetcher(loader, share, sampler.seed), sampler, share)
        self._indices: list[list[int]] = []
        self._loader = DataLoader(
            loader.dataset,
            batch_sampler=_Refilled(self._indices),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=True,  # Starting them anew each epoch would be part of a step's time.
        )

    def shares(self, epoch: int | None) -> Iterator[PiecesOf]:  # noqa: ARG002
        raise UsageError(
            "a DataLoader with workers loads ahead, but who trains what is only known in the last moment here.",
            hint="use num_workers=0, or a strategy under which ranks step together",
        )

    def epoch(self, epoch: int | None) -> Iterator[list[Piece]]:
        steps = [pieces_of(self.share.rank) for pieces_of in super().shares(epoch)]
        self._indices[:] = [piece.content.tolist() for pieces in steps for piece in pieces]
        fetched = iter(self._loader)
        for pieces in steps:
            yield [replace(piece, content=next(fetched)) for piece in pieces]

    def fetch(self, piece: Piece) -> Any:
        return self.share.place(piece.content)


class _Refilled:
    """A batch sampler whose batches are put in before each epoch."""

    def __init__(self, batches: list[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(self._batches))

    def __len__(self) -> int:
        return len(self._batches)


class Stream(Source):
    """An iterable of global batches: every rank goes through it and takes its share of each."""

    def __init__(self, batches: Iterable[Any], share: Share, seed: int) -> None:
        super().__init__(share)
        self._batches = batches
        self._seed = seed

    def steps(self) -> None:
        return None

    @property
    def expected_steps(self) -> int | None:
        return len(self._batches) if isinstance(self._batches, Sized) else None

    def shares(self, epoch: int | None) -> Iterator[PiecesOf]:
        if epoch is not None and hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(epoch)
        smallest = self.share.workers * self.share.micro_batches if epoch is not None else 1
        for batch in _drawn_alike(self._batches, epoch_key(self._seed, epoch or 0)):
            total = _samples_in(batch)
            if total >= smallest:
                yield self._cut(total, epoch, lambda part, batch=batch: _slice(batch, part))  # type: ignore[misc]

    def fetch(self, piece: Piece) -> Any:
        return self.share.place(piece.content)

    def peek(self, samples: int) -> Any | None:
        if iter(self._batches) is self._batches:
            return None
        batch = next(iter(self._batches), None)
        return None if batch is None else self.share.place(_slice(batch, range(min(samples, _samples_in(batch)))))


def _drawn_alike(batches: Iterable[Any], key: int) -> Iterator[Any]:
    """Goes through batches with random numbers of their own, so that one that shuffles does so alike on all ranks."""
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
    """The source for a data set, tensors, a DataLoader or an iterable of global batches."""
    smallest = share.workers * share.micro_batches if train else 1
    if not _can_index(data):
        return Stream(data, share, seed)
    size = _samples_of(data)
    if size < smallest:
        raise UsageError(
            f"{size} training samples are too few for {share.workers} ranks × {share.micro_batches} micro-batches."
            if train
            else "the test data is empty.",
            hint="use fewer ranks" if train else "give some, or test=None",
        )
    sampler = Sampler(size, batch, seed, shuffle=train, reshuffle=reshuffle, smallest=smallest)
    if isinstance(data, DataLoader) and data.num_workers > 0:
        return Loaded(data, sampler, share)
    return Indexed(_fetcher(data, share, seed), sampler, share, share.device if isinstance(data, ImageSet) else None)


def _fetcher(data: Any, share: Share, seed: int) -> Callable[[Tensor, int | None], Any]:
    """How to get the samples of given indices, on the device."""
    if isinstance(data, ImageSet):
        images = data.to(share.device)
        return lambda indices, epoch: images.batch(
            indices, seed=seed, epoch=epoch, dtype=share.dtype, channels_last=share.channels_last
        )
    if isinstance(data, Tensor):
        return lambda indices, _: share.place(data[indices])
    if type(data) is TensorDataset:  # Not a subclass, which may have an index of its own.
        data = data.tensors
    if isinstance(data, tuple):
        return lambda indices, _: share.place(tuple(tensor[indices] for tensor in data))
    dataset, collate = (data.dataset, data.collate_fn) if isinstance(data, DataLoader) else (data, default_collate)
    if hasattr(dataset, "__getitems__"):
        return lambda indices, _: share.place(collate(dataset.__getitems__(indices.tolist())))
    return lambda indices, _: share.place(collate([dataset[index] for index in indices.tolist()]))


def _can_index(data: Any) -> bool:
    """Whether this is a data set of samples; a list is an iterable of batches, a tuple holds tensors of samples."""
    if isinstance(data, DataLoader):  # What it loads are samples, in a list too, unless it says otherwise.
        return hasattr(data.dataset, "__len__") and not isinstance(data.dataset, IterableDataset)
    if isinstance(data, tuple):
        return all(isinstance(member, Tensor) for member in data)
    if isinstance(data, ImageSet):
        return True
    if isinstance(data, IterableDataset):  # It may have a length, and inherits an index that only raises.
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list)


def _samples_of(data: Any) -> int:
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


def _tensors_in(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map_tensors(batch, found.append)
    return found


def _samples_in(batch: Any) -> int:
    tensors = _tensors_in(batch)
    if not tensors or tensors[0].dim() == 0:
        raise WorkloadError(
            f"a batch of type {type(batch).__name__} holds no tensor to count samples by.",
            hint="batches are tensors, or tuples, lists or dicts of tensors, samples along the first dimension",
        )
    return len(tensors[0])


def _slice(batch: Any, part: range) -> Any:
    total = _samples_in(batch)
    return _map_tensors(
        batch, lambda tensor: tensor[part.start : part.stop] if tensor.dim() and len(tensor) == total else tensor
    )
