"""Sources of batches: split any kind of training data into this rank's micro-batches of each global batch.

A micro-batch has a weight. The gradient of its mean loss times the weight, averaged over the ranks, is the mean over
all samples of the global batch, even if the ranks have different numbers of samples.
"""

from __future__ import annotations

import functools
import itertools
import traceback
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from paceline.comm.messages.nested_tensors import tensors_in
from paceline.errors import PacelineError, UsageError, WorkloadError
from paceline.workloads.data.images import ImageSet
from paceline.workloads.gpu_copy import copy_to_gpu
from paceline.workloads.loader_sampler import sampler_of_loader
from paceline.workloads.position import START, Position
from paceline.workloads.sampler import DrawnSampler, EpochPlan, Sampler, epoch_key, sampler_of_size, split
from paceline.workloads.samples import ImageSamples, Samples, samples_of
from paceline.workloads.separate_random_state import SeparateRandomState

PROBES = 16
"""Samples that ranks read to find out whether they have the same data."""
FIRST_BATCH = "the first batch"
"""Name of the part of an iterable that ranks compare."""


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
        return map_batch(batch, self._tensor_to_device)

    def _tensor_to_device(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else None
        # Inputs of five dimensions may be frames, with the channels third, and Conv3d takes the layout of its weight
        # whatever its input has.
        images = self.channels_last and tensor.dim() == 4
        layout = torch.channels_last if images else torch.preserve_format
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            tensor = copy_to_gpu(tensor, self.device)
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

    def steps_after(self, skip: int) -> int | None:
        """Return the steps of an epoch that follow its first `skip` samples; None if the length is unknown."""
        return self.steps_per_epoch() if not skip else None

    def normalised(self, position: Position) -> Position:
        """Return the position at the beginning of the next epoch, if all samples of its own are trained."""
        if position.epoch_samples and self.steps_after(position.epoch_samples) == 0:
            ends = (*position.epoch_ends[: position.epoch], position.step)
            return Position(step=position.step, epoch=position.epoch + 1, epoch_ends=ends)
        return position

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

    @property
    def runs_once(self) -> bool:
        """Whether the data can be read only once, as that of a generator."""
        return False

    @property
    def read_batches(self) -> int:
        """Batches of the epoch that were read, also those too small to train; 0 if the data has a length."""
        return 0

    @abstractmethod
    def global_steps(self, epoch: int | None, start: Position = START) -> Iterator[MicroBatchesOfRank]:
        """Yield, for each step of an epoch, a function that returns any rank's micro-batches of it.

        What the ranks have trained of the epoch before the position `start`, where a run resumes, is left out.
        """

    def epoch(self, epoch: int | None, start: Position = START) -> Iterator[list[MicroBatch]]:
        """Yield this rank's micro-batches of each step of an epoch, from a position in it."""
        for micro_batches_of in self.global_steps(epoch, start):
            yield micro_batches_of(self.share.rank)

    @abstractmethod
    def fetch(self, micro_batch: MicroBatch) -> Any:
        """Return the batch itself, on the device."""

    @abstractmethod
    def peek(self, samples: int) -> Any | None:
        """Return a batch of a few samples for a test of the model; None if fetching would consume the data."""

    def probes(self) -> dict[str, Callable[[], Any]]:
        """Return functions that read a few parts of the data, by name: the same on all ranks if the data is.

        There is none if the length of the data is unknown and reading would consume it.
        """
        return {}

    def order_checksum(self, epoch: int) -> int | None:  # noqa: ARG002
        """Return a checksum of the samples that a user's sampler draws in an epoch; None if Paceline chooses them."""
        return None

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Tensors that hold all of the data, samples along the first dimension; empty if there are none."""
        return ()

    def find_sample(self, epoch: int, step: int, is_wanted: Callable[[Tensor], Tensor]) -> int | None:  # noqa: ARG002
        """Return a sample of this rank's share of a step that has wanted values; `step` is counted from 0 in its epoch.

        None if there is none, or if the samples cannot be read again.
        """
        return None

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

    def __init__(self, samples: Samples, sampler: Sampler, share: Share) -> None:
        super().__init__(share)
        self._samples = samples
        self._sampler = sampler
        # What is on the device of the run is indexed there.
        self._indices_on = next((column.device for column in samples.columns), None)

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

    def steps_after(self, skip: int) -> int:
        return self._sampler.steps_after(skip)

    def global_steps(self, epoch: int | None, start: Position = START) -> Iterator[MicroBatchesOfRank]:
        for batch in self._sampler.batches(epoch or 0, self._indices_on, start.epoch_samples):
            yield self._split_batch(len(batch), epoch, lambda part, batch=batch: batch[part.start : part.stop])  # type: ignore[misc]

    def fetch(self, micro_batch: MicroBatch) -> Any:
        return self._fetch(micro_batch.content, micro_batch.epoch)

    def peek(self, samples: int) -> Any | None:
        return self._fetch(self._sampler.first(samples), 0)

    def probes(self) -> dict[str, Callable[[], Any]]:
        size = self._sampler.size
        first = self._sampler.first(size)
        drawn = torch.randint(size, (PROBES - 2,), generator=torch.Generator().manual_seed(size)).tolist()
        positions = sorted({0, size - 1, *drawn})
        probes: dict[str, Callable[[], Any]] = {}
        if self._sampler.subset is not None or isinstance(self._sampler, DrawnSampler):
            probes["the choice of samples by the sampler"] = lambda: first
        return probes | {
            f"sample {position}": functools.partial(self._samples.read, int(first[position])) for position in positions
        }

    def order_checksum(self, epoch: int) -> int | None:
        if not isinstance(self._sampler, DrawnSampler):
            return None
        return zlib.crc32(self._sampler.order(epoch).numpy().tobytes())

    def find_sample(self, epoch: int, step: int, is_wanted: Callable[[Tensor], Tensor]) -> int | None:
        batch = next(itertools.islice(self._sampler.batches(epoch), step, None), None)
        own = [] if batch is None else split(len(batch), self.share.workers)[self.share.rank]
        for index in (int(batch[at]) for at in own):  # type: ignore[index]
            if any(
                bool(is_wanted(tensor).any()) for tensor in tensors_in(self._samples.batch(torch.tensor([index]), None))
            ):
                return index
        return None

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return self._samples.columns

    def _fetch(self, indices: Tensor, epoch: int | None) -> Any:
        return self.share.to_device(self._samples.batch(indices, epoch))


CHUNK_SAMPLES = 4096
"""Samples that are augmented together on a GPU: 50 MB of images of 3×32×32 in float32."""


class ChunkedSource(IndexedSource):
    """Source that makes the batches of several steps at once, for images on a GPU.

    Augmentation consists of about 40 small kernels, whose launches take longer than a small step of the model. It is
    keyed by the sample, so batches are the same however many are made together.
    """

    def epoch(self, epoch: int | None, start: Position = START) -> Iterator[list[MicroBatch]]:
        steps = super().epoch(epoch, start)
        while chunk := self._next_chunk(steps):
            contents = [micro_batch.content for micro_batches in chunk for micro_batch in micro_batches]
            sizes = [micro_batch.samples for micro_batches in chunk for micro_batch in micro_batches]
            made = _SampleChunk(functools.partial(self._fetch, torch.cat(contents), epoch), sizes)
            parts = itertools.count()
            for micro_batches in chunk:
                yield [
                    replace(micro_batch, content=_SampleChunkPart(made, next(parts))) for micro_batch in micro_batches
                ]

    @staticmethod
    def _next_chunk(steps: Iterator[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """Return the micro-batches of as many steps as make a chunk, at least of one; empty if there are no more."""
        chunk, samples = list[list[MicroBatch]](), 0
        for micro_batches in steps:
            chunk.append(micro_batches)
            samples += sum(micro_batch.samples for micro_batch in micro_batches)
            if samples + samples // len(chunk) > CHUNK_SAMPLES:
                break
        return chunk

    def fetch(self, micro_batch: MicroBatch) -> Any:
        if isinstance(micro_batch.content, _SampleChunkPart):
            return micro_batch.content.batch
        return super().fetch(micro_batch)  # Of a step that was asked for by its number.


class _SampleChunk:
    """Samples of several steps, made into one batch when the first of them is fetched."""

    def __init__(self, fetch: Callable[[], Any], sizes: list[int]) -> None:
        self._fetch, self._sizes = fetch, sizes

    @functools.cached_property
    def batches(self) -> list[tuple[Tensor, ...]]:
        """Micro-batches of all steps, as parts of one batch on the device, without copies."""
        return list(zip(*(column.split(self._sizes) for column in self._fetch()), strict=True))


@dataclass(frozen=True, slots=True)
class _SampleChunkPart:
    """One micro-batch of a chunk."""

    chunk: _SampleChunk
    number: int

    @property
    def batch(self) -> Any:
        """The samples, without a copy."""
        return self.chunk.batches[self.number]


class LoaderSource(IndexedSource):
    """Source for a DataLoader with worker processes, which fetch, collate and pin as configured, at our indices."""

    def __init__(self, loader: DataLoader[Any], samples: Samples, sampler: Sampler, share: Share) -> None:
        super().__init__(samples, sampler, share)
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
            # It seeds the workers' `random`, numpy and torch: differently on each rank, since ranks with the same
            # random numbers would augment their samples alike.
            generator=torch.Generator().manual_seed(epoch_key(sampler.seed, share.rank)),
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=True,  # Restarting them in each epoch would count as part of a step's time.
        )

    def global_steps(self, epoch: int | None, start: Position = START) -> Iterator[MicroBatchesOfRank]:  # noqa: ARG002
        raise UsageError(
            "a DataLoader with workers loads ahead, but under this strategy ranks receive their samples step by step.",
            hint="use num_workers=0, or a strategy under which ranks step together",
        )

    def epoch(self, epoch: int | None, start: Position = START) -> Iterator[list[MicroBatch]]:
        steps = [micro_batches_of(self.share.rank) for micro_batches_of in super().global_steps(epoch, start)]
        self._indices[:] = [micro_batch.content.tolist() for micro_batches in steps for micro_batch in micro_batches]
        fetched = iter(self._loader)
        for micro_batches in steps:
            yield [replace(micro_batch, content=_next_of_workers(fetched)) for micro_batch in micro_batches]

    def fetch(self, micro_batch: MicroBatch) -> Any:
        return self.share.to_device(micro_batch.content)


def _next_of_workers(fetched: Iterator[Any]) -> Any:
    try:
        return next(fetched)
    except PacelineError:
        raise
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[
            -1
        ]  # Of the traceback in the worker, which torch makes the message.
        raise WorkloadError(
            f"a worker process of the DataLoader failed: {cause}",
            hint="correct the data set; the traceback above shows where it failed",
            detail=traceback.format_exc().rstrip(),
        ) from None


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
        self._first: Any | None = None
        """First batch, if it has been read for a check: the next check need not read it again."""
        self._read = 0

    def steps_per_epoch(self) -> None:
        return None

    @property
    def expected_steps(self) -> int | None:
        return len(self._batches) if isinstance(self._batches, Sized) else None

    @property
    def read_batches(self) -> int:
        return self._read

    def global_steps(self, epoch: int | None, start: Position = START) -> Iterator[MicroBatchesOfRank]:
        """Iterate over the batches of an epoch; those before the position are read and dropped.

        They are counted, because another number of ranks may have trained them, for which other batches are too small.
        """
        if epoch is not None and hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(epoch)
        smallest = self.share.workers * self.share.micro_batches_per_step if epoch is not None else 1
        skip = 0 if start.epoch_batches else start.epoch_samples
        for number, batch in enumerate(_iterate_with_rng(self._batches, epoch_key(self._seed, epoch or 0)), start=1):
            self._read = number
            if number <= start.epoch_batches:
                continue
            total = batch_size(batch)
            if smallest > 1 or self.share.workers > 1:
                _check_pair(batch)
            if total < smallest:  # Never trained, so its samples are not among the first `skip`.
                continue
            if skip > 0:
                skip -= total
                continue
            yield self._split_batch(total, epoch, lambda part, batch=batch: _slice(batch, part))  # type: ignore[misc]

    def fetch(self, micro_batch: MicroBatch) -> Any:
        return self.share.to_device(micro_batch.content)

    def peek(self, samples: int) -> Any | None:
        batch, self._first = self._first if self._first is not None else self._read_first(), None
        return None if batch is None else self.share.to_device(_slice(batch, range(min(samples, batch_size(batch)))))

    def probes(self) -> dict[str, Callable[[], Any]]:
        return {} if self.runs_once else {FIRST_BATCH: self._read_first}

    @property
    def runs_once(self) -> bool:
        return iter(self._batches) is self._batches

    def _read_first(self) -> Any | None:
        """Return the first batch of the first epoch; None if there is none, or if taking it would consume it."""
        if not self.runs_once:
            self._first = next(_iterate_with_rng(self._batches, epoch_key(self._seed, 0)), None)
        return self._first


def _iterate_with_rng(batches: Iterable[Any], key: int) -> Iterator[Any]:
    """Iterate with a separate random state, so that an iterable that shuffles does so equally on all ranks."""
    end, state = object(), SeparateRandomState(key)
    with state.in_use():
        iterator = iter(batches)
    while True:
        with state.in_use():
            batch = next(iterator, end)
        if batch is end:
            return
        yield batch


def make_source(
    data: Any, share: Share, *, batch: int, seed: int, reshuffle: bool = True, train: bool = True
) -> Source:
    """Return the source for a data set, tensors, a DataLoader or an iterable of global batches.

    A batch larger than the data is reduced to all of the data.
    """
    smallest = share.workers * share.micro_batches_per_step if train else 1
    if not is_indexable(data):
        return StreamSource(data, share, seed)
    plan = EpochPlan(batch, seed, train, reshuffle, smallest)
    sampler = (
        sampler_of_loader(data, plan) if isinstance(data, DataLoader) else sampler_of_size(dataset_size(data), plan)
    )
    if sampler.size < smallest:
        raise UsageError(
            f"{sampler.size} training samples are too few for {share.workers} ranks × "
            f"{share.micro_batches_per_step} micro-batches."
            if train
            else "the test data is empty.",
            hint="use fewer ranks or more samples" if train else "provide test samples, or set test=None",
        )
    samples = samples_of(data, seed, share.device, share.dtype, channels_last=share.channels_last)
    if isinstance(data, DataLoader) and data.num_workers > 0:
        return LoaderSource(data, samples, sampler, share)
    in_chunks = train and share.device.type == "cuda" and isinstance(samples, ImageSamples)
    return (ChunkedSource if in_chunks else IndexedSource)(samples, sampler, share)


def is_indexable(data: Any) -> bool:
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


def dataset_size(data: Any) -> int:
    """Return the number of samples of indexable data."""
    if isinstance(data, tuple):
        return len(data[0])
    return len(data.dataset) if isinstance(data, DataLoader) else len(data)  # type: ignore[arg-type]


def map_batch(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a batch with each tensor replaced, of the same mappings, lists, tuples and named tuples."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_batch(value, change) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [map_batch(value, change) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def batch_size(batch: Any) -> int:
    """Return the number of samples in a batch, by its first tensor."""
    first = next(tensors_in(batch), None)
    if first is None or first.dim() == 0:
        raise WorkloadError(
            f"a batch of type {type(batch).__name__} has no tensor to count its samples by.",
            hint="use tensors, or tuples, lists or dicts of tensors, with the samples along the first dimension",
        )
    return len(first)


def _check_pair(batch: Any) -> None:
    """Raise if a batch of inputs and targets has more of the one: only what has a row per sample is split."""
    if isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        first, second = batch
        if second.dim() and len(first) != len(second):
            raise WorkloadError(
                f"a batch has {len(first)} inputs and {len(second)} targets, so it cannot be split over the ranks.",
                hint="give each sample one row in both; put values of the whole batch into a dict",
            )


def _slice(batch: Any, part: range) -> Any:
    total = batch_size(batch)
    return map_batch(
        batch, lambda tensor: tensor[part.start : part.stop] if tensor.dim() and len(tensor) == total else tensor
    )


def repeat_batch(batch: Any, size: int, copies: int) -> Any:
    """Return a batch with so many copies of each of its `size` samples; tensors of the whole batch are kept."""
    return map_batch(
        batch,
        lambda tensor: torch.cat([tensor] * copies) if tensor.dim() and len(tensor) == size else tensor.clone(),
    )
