"""Tests of micro-batches: those of all ranks are the global batch, and their weights make a plain mean exact."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from paceline.errors import UsageError, WorkloadError
from paceline.workloads import batches
from paceline.workloads.batches import (
    ChunkedSource,
    IndexedSource,
    LoaderSource,
    Share,
    Source,
    StreamSource,
    make_source,
)
from paceline.workloads.data.images import ImageSet
from paceline.workloads.position import START, Position
from paceline.workloads.sampler import Sampler
from workloads.test_gpu_copy import delay_copies

CPU = torch.device("cpu")
SIZE, BATCH, SEED = 47, 12, 3
NUMBERS = torch.arange(SIZE)
PAIRS = (NUMBERS.double().view(-1, 1), NUMBERS)


class Items(Dataset[tuple[Tensor, int]]):
    """Data set with an index for single samples."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return PAIRS[0][index], index


class ItemsAtOnce(Items):
    """Data set with `__getitems__`, which PyTorch's fetchers prefer."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [(PAIRS[0][index], index) for index in indices]


class Forgetful(IterableDataset[tuple[Tensor, Tensor]]):
    """Iterable of global batches with a length."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(global_batches())


class Factory:
    """Iterable that creates a new generator each time and receives the epoch by `set_epoch`."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from global_batches()


def global_batches() -> list[tuple[Tensor, Tensor]]:
    """Yield batches of 12, 12, 12 and 11 samples."""
    return [(PAIRS[0][start : start + BATCH], NUMBERS[start : start + BATCH]) for start in range(0, SIZE, BATCH)]


def keep_list(samples: list[tuple[Tensor, int]]) -> dict[str, Any]:
    """Collate into a dict instead of a tuple."""
    inputs, target = default_collate(samples)
    return {"inputs": inputs, "target": target}


def share_of(rank: int, workers: int, micro_batches: int = 1, **options: Any) -> Share:
    return Share(rank, workers, micro_batches, CPU, **{"dtype": torch.float64} | options)


def sources(data: Any, workers: int, micro_batches: int = 1, **options: Any) -> list[Source]:
    return [
        make_source(data, share_of(rank, workers, micro_batches), **{"batch": BATCH, "seed": SEED} | options)
        for rank in range(workers)
    ]


def target_of(batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return batch.long().flatten()
    inputs, target = batch.values() if isinstance(batch, dict) else batch
    assert torch.equal(inputs.flatten().long(), target), "inputs and targets stay together"
    return target


def walk(ranks: list[Source], epoch: int | None) -> list[list[int]]:
    """Yield the samples of each step, rank by rank, after checking sizes and weights."""
    steps: list[list[int]] = []
    for everyone in zip(*[source.epoch(epoch) for source in ranks], strict=True):
        pieces = [piece for own in everyone for piece in own]
        total = sum(piece.samples for piece in pieces)
        assert sum(piece.weight for piece in pieces) == pytest.approx(len(ranks))
        samples: list[int] = []
        for own, source in zip(everyone, ranks, strict=True):
            for piece in own:
                assert piece.weight == pytest.approx(piece.samples * len(ranks) / total)
                assert piece.epoch == epoch
                fetched = target_of(source.fetch(piece)).tolist()
                assert len(fetched) == piece.samples > 0
                samples += fetched
        steps.append(samples)
    return steps


def joined(steps: list[list[int]]) -> list[int]:
    return [sample for step in steps for sample in step]


INDEXED = {
    "tensors": PAIRS,
    "one tensor": NUMBERS,
    "TensorDataset": TensorDataset(*PAIRS),
    "items": Items(),
    "items at once": ItemsAtOnce(),
    "DataLoader": DataLoader(Items(), batch_size=5, shuffle=True),
    "DataLoader with collate": DataLoader(ItemsAtOnce(), batch_size=5, collate_fn=keep_list),
    "DataLoader of a list": DataLoader([(PAIRS[0][index], index) for index in range(SIZE)], batch_size=5),
    "DataLoader of a TensorDataset": DataLoader(TensorDataset(*PAIRS), batch_size=5),
}


@pytest.mark.parametrize("data", INDEXED.values(), ids=INDEXED.keys())
@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 1), (3, 1), (4, 1), (2, 3)])
def test_the_union_of_the_pieces_is_the_samplers_batch(data: Any, workers: int, micro_batches: int) -> None:
    ranks = sources(data, workers, micro_batches)
    assert all(type(source) is IndexedSource for source in ranks)
    for epoch in (0, 1):
        expected = [batch.tolist() for batch in Sampler(SIZE, BATCH, SEED).batches(epoch)]
        assert walk(ranks, epoch) == expected
    assert {(source.steps_per_epoch(), source.expected_steps, source.batch, source.dropped) for source in ranks} == {
        (4, 4, BATCH, 0)
    }


@pytest.mark.parametrize("data", INDEXED.values(), ids=INDEXED.keys())
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_evaluation_takes_every_sample_once_in_order(data: Any, workers: int) -> None:
    samples = walk(sources(data, workers, train=False), None)
    assert joined(samples) == list(range(SIZE))


def test_a_last_batch_too_small_for_the_ranks_is_left_out_in_training_only() -> None:
    few = NUMBERS[:38]  # 12, 12, 12 and 2
    training = sources(few, 3)
    assert [len(samples) for samples in walk(training, 0)] == [12, 12, 12]
    assert training[0].dropped == 2
    assert training[0].steps_per_epoch() == 3
    testing = sources(few, 3, train=False)
    assert joined(walk(testing, None)) == list(range(38))
    assert testing[0].dropped == 0


def test_evaluation_leaves_a_rank_without_a_piece_rather_than_pad() -> None:
    last = [list(source.epoch(None))[-1] for source in sources(NUMBERS[:38], 3, train=False)]
    assert [[piece.samples for piece in pieces] for pieces in last] == [[1], [1], []]


def test_reshuffling_can_be_forgotten() -> None:
    (forgetful,), (reshuffling,) = sources(NUMBERS, 1, reshuffle=False), sources(NUMBERS, 1)
    assert walk([forgetful], 0) == walk([forgetful], 5) == walk([reshuffling], 0) != walk([reshuffling], 5)


def test_too_few_samples_for_the_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="3 training samples are too few for 4 ranks"):
        make_source(NUMBERS[:3], share_of(0, 4), batch=BATCH, seed=0)
    with pytest.raises(UsageError, match="5 training samples are too few for 2 ranks × 3 micro-batches"):
        make_source(NUMBERS[:5], share_of(0, 2, 3), batch=BATCH, seed=0)
    assert joined(walk(sources(NUMBERS[:3], 4, train=False), None)) == [0, 1, 2]


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 5))
def test_pieces_of_all_ranks_tile_the_batch(total: int, workers: int, micro_batches: int) -> None:
    positions = [
        position
        for rank in range(workers)
        for part in share_of(rank, workers, micro_batches).ranges(total)
        for position in part
    ]
    assert positions == list(range(total))


@pytest.mark.parametrize("collate", [None, keep_list], ids=["default collate", "own collate"])
def test_a_loader_with_processes_fetches_our_indices(collate: Any) -> None:
    loader = DataLoader(Items(), batch_size=5, num_workers=2, collate_fn=collate)
    ranks = sources(loader, 2, micro_batches=2)
    assert all(type(source) is LoaderSource for source in ranks)
    expected = [batch.tolist() for batch in Sampler(SIZE, BATCH, SEED).batches(1)]
    assert walk(ranks, 1) == expected
    (piece, _), kind = next(ranks[0].epoch(0)), dict if collate else list
    assert isinstance(ranks[0].fetch(piece), kind)
    assert isinstance(ranks[0].peek(3), kind)


def test_a_loader_with_processes_evaluates_every_sample_once() -> None:
    loader = DataLoader(Items(), num_workers=2)
    assert joined(walk(sources(loader, 2, train=False), None)) == list(range(SIZE))


STREAMS = {
    "list": global_batches(),
    "factory": Factory(),
    "dicts": [{"inputs": inputs, "target": target} for inputs, target in global_batches()],
    "IterableDataset": Forgetful(),
    "loader of an IterableDataset": DataLoader(Forgetful(), batch_size=None),
}


@pytest.mark.parametrize("data", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("epoch", [0, 1, None])
def test_a_stream_is_shared_batch_by_batch(data: Any, workers: int, micro_batches: int, epoch: int | None) -> None:
    ranks = sources(data, workers, micro_batches, train=epoch is not None)
    assert all(type(source) is StreamSource for source in ranks)
    assert walk(ranks, epoch) == [target.tolist() for _, target in global_batches()]
    assert ranks[0].steps_per_epoch() is None
    assert ranks[0].batch is None


def test_a_stream_leaves_out_a_batch_too_small_to_share_in_training_only() -> None:
    batches = [NUMBERS[:12], NUMBERS[12:14], NUMBERS[14:17], NUMBERS[17:28]]
    assert [len(step) for step in walk(sources(batches, 3), 0)] == [12, 3, 11]
    assert [len(step) for step in walk(sources(batches, 3, train=False), None)] == [12, 2, 3, 11]
    assert [len(step) for step in walk(sources(batches, 2, micro_batches=2), 0)] == [12, 11]


SMALL_BATCHES = [NUMBERS[:2], NUMBERS[2:5], NUMBERS[5:7], NUMBERS[7:10], NUMBERS[10:12], NUMBERS[12:15]]


def first_targets(source: Source, start: Position = START) -> list[Any]:
    """Return the first target of each step, from a position."""
    return [target_of(source.fetch(pieces[0])).tolist()[0] for pieces in source.epoch(0, start)]


@pytest.mark.parametrize("before", [2, 3])
@pytest.mark.parametrize("after", [2, 3])
def test_a_stream_resumes_on_any_number_of_ranks(before: int, after: int) -> None:
    """A batch of 2 samples is trained by 2 ranks and too small for 3: which were read counts, not how many samples."""
    (source, *_), (resumed, *_) = sources(SMALL_BATCHES, before), sources(SMALL_BATCHES, after)
    steps, samples = source.epoch(0), 0
    every = [(int(batch[0]), len(batch)) for batch in SMALL_BATCHES]
    while next(steps, None) is not None:
        samples += every[source.read_batches - 1][1]
        left = every[source.read_batches :]
        position = Position(epoch_samples=samples, epoch_batches=source.read_batches)
        assert first_targets(resumed, position) == [first for first, size in left if size >= after]


def test_a_stream_resumes_from_a_checkpoint_without_the_number_of_batches() -> None:
    """By samples: a batch that was too small to share was never trained, so it does not count among them."""
    (source, *_) = sources(SMALL_BATCHES, 3)
    for done in range(4):
        assert first_targets(source, Position(epoch_samples=3 * done)) == first_targets(source)[done:]


def test_a_stream_knows_its_length_where_it_has_one() -> None:
    assert sources(global_batches(), 1)[0].expected_steps == 4
    assert sources(Factory(), 1)[0].expected_steps is None


def test_a_stream_is_told_the_epoch_of_training() -> None:
    factory = Factory()
    (source,) = sources(factory, 1)
    for epoch in (0, 3, None):
        list(source.epoch(epoch))
    assert factory.epochs == [0, 3]


def test_a_stream_slices_what_has_samples_and_keeps_the_rest() -> None:
    scale = torch.tensor(2.0)
    batch = {"x": NUMBERS[:5], "scale": scale, "table": torch.ones(3), "name": "batch", "nested": [NUMBERS[5:10]]}
    first, second = sources([batch], 2)
    own, other = (source.fetch(next(source.epoch(0))[0]) for source in (first, second))
    assert own["x"].tolist() == [0, 1, 2]
    assert other["x"].tolist() == [3, 4]
    assert other["nested"][0].tolist() == [8, 9]
    assert other["scale"] == scale
    assert other["table"].tolist() == [1, 1, 1]
    assert other["name"] == "batch"


def test_a_stream_keeps_named_tuples() -> None:
    point = namedtuple("point", "x y")
    (source,) = sources([point(NUMBERS[:4], NUMBERS[4:8])], 1)
    fetched = source.fetch(next(source.epoch(0))[0])
    assert fetched.y.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("batch", ["text", {"a": 1}, torch.tensor(1.0)])
def test_a_batch_without_samples_is_the_workloads_mistake(batch: Any) -> None:
    (source,) = sources([batch], 1)
    with pytest.raises(WorkloadError, match="has no tensor to count its samples by"):
        list(source.epoch(0))


def test_a_peek_shows_a_few_samples() -> None:
    for data in (*INDEXED.values(), *STREAMS.values()):
        (source,) = sources(data, 1)
        assert target_of(source.peek(3)).tolist() == [0, 1, 2]
        assert len(target_of(source.peek(1000))) in (SIZE, BATCH)


def test_a_peek_does_not_use_up_what_comes_once() -> None:
    (source,) = sources(iter(global_batches()), 1)
    assert source.peek(3) is None
    assert len(walk([source], 0)) == 4
    (empty,) = sources([], 1)
    assert empty.peek(3) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_floats_take_the_precision_of_the_run_and_images_its_layout(dtype: torch.dtype, channels_last: bool) -> None:
    share = share_of(0, 1, dtype=dtype, channels_last=channels_last)
    images, labels, row = share.to_device((torch.randn(2, 3, 4, 5), torch.tensor([1, 2]), torch.randn(2, 3)))
    assert (images.dtype, labels.dtype, row.dtype) == (dtype, torch.int64, dtype)
    assert images.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert images.is_contiguous() != channels_last


@pytest.mark.parametrize("kind", ["tensors", "items", "loader", "stream", "images"])
def test_every_source_places_what_it_fetches(kind: str) -> None:
    images, labels = torch.randn(8, 3, 4, 5), torch.arange(8)
    image_set = ImageSet(
        name="x",
        images=torch.zeros(8, 3, 4, 5, dtype=torch.uint8),
        labels=labels,
        classes=8,
        mean=(0,) * 3,
        std=(1,) * 3,
    )
    data = {
        "tensors": (images, labels),
        "items": [*zip(images, labels, strict=True)],
        "loader": DataLoader(TensorDataset(images, labels), num_workers=1),
        "stream": [(images, labels)],
        "images": image_set,
    }[kind]
    if kind == "items":
        data = DataLoader(data)
    source = make_source(data, share_of(0, 1, channels_last=True), batch=8, seed=0)
    for pieces in source.epoch(0):
        for batch in (source.fetch(pieces[0]), source.peek(4)):
            assert batch[0].dtype == torch.float64
            assert batch[0].is_contiguous(memory_format=torch.channels_last)
            assert batch[1].dtype == torch.int64


def test_images_are_augmented_in_training_and_not_in_evaluation() -> None:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (16, 1, 8, 8), dtype=torch.uint8)
    images = ImageSet(
        name="x", images=pixels, labels=torch.arange(16), classes=16, mean=(0.5,), std=(0.5,), crop_padding=2, flip=True
    )
    for train in (True, False):
        share = share_of(1, 2, dtype=torch.float32)
        source = make_source(images, share, batch=16, seed=SEED, train=train)
        (piece,) = next(source.epoch(4 if train else None))
        fetched, labels = source.fetch(piece)
        expected, _ = images.batch(labels, seed=SEED, epoch=4 if train else None)
        plain, _ = images.batch(labels, seed=SEED, epoch=None)
        assert torch.equal(fetched, expected)
        assert torch.equal(fetched, plain) != train
        assert len(labels) == 8


def test_the_weighted_mean_over_ranks_is_the_mean_over_samples() -> None:
    """Weights make the mean exact for 11 samples on 3 ranks × 2 micro-batches, with shares of 4, 4 and 3."""
    values = torch.randn(11, dtype=torch.float64)
    total = 0.0
    for source in sources(values, 3, micro_batches=2, batch=11):
        (pieces,) = source.epoch(0)
        assert len(pieces) == 2
        # The loop weights each micro-batch's mean loss, and the strategy takes the plain mean over ranks.
        total += sum(piece.weight * float(source.fetch(piece).mean()) for piece in pieces) / 3
    assert total == pytest.approx(float(values.mean()))


class Transformed(TensorDataset):
    """Data set of tensors with its own index."""

    def __getitem__(self, index: int) -> Any:
        return tuple(1000 + tensor for tensor in super().__getitem__(index))


def test_a_subclass_of_a_tensor_data_set_keeps_its_index() -> None:
    source = make_source(Transformed(torch.arange(4.0)), Share(0, 1, 1, torch.device("cpu")), batch=4, seed=0)
    ((piece,),) = source.epoch(0)
    assert source.fetch(piece)[0].min() >= 1000


def test_persistent_workers_get_each_epochs_own_order() -> None:
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=3, num_workers=1)
    source = make_source(loader, Share(0, 1, 1, torch.device("cpu")), batch=4, seed=0)
    epochs = [torch.cat([source.fetch(piece)[0] for (piece,) in source.epoch(epoch)]).tolist() for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))


def test_an_empty_test_set_is_called_that() -> None:
    with pytest.raises(UsageError, match="the test data is empty"):
        make_source(TensorDataset(torch.empty(0)), Share(0, 1, 1, torch.device("cpu")), batch=4, seed=0, train=False)


class Dice(Dataset[Tensor]):
    """Data set whose samples are random numbers of all three generators."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([random.random(), np.random.random(), float(torch.rand(()))], dtype=torch.float64)


def test_worker_processes_draw_other_numbers_on_each_rank_and_the_same_in_each_run() -> None:
    """Even if the user gives the loader a generator with a seed, which all ranks share."""

    def drawn(rank: int) -> list[float]:
        loader = DataLoader(Dice(), num_workers=1, generator=torch.Generator().manual_seed(5))
        source = make_source(loader, share_of(rank, 2), batch=8, seed=SEED)
        return [number for (piece,) in source.epoch(0) for number in source.fetch(piece).flatten().tolist()]

    first, second = drawn(0), drawn(1)
    assert len({*first, *second}) == 24
    assert drawn(0) == first


def test_an_iterable_draws_from_all_generators_by_seed_and_epoch() -> None:
    class Drawing:
        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(2):
                yield torch.tensor([random.random(), np.random.random(), float(torch.rand(()))], dtype=torch.float64)

    def drawn(epoch: int) -> list[float]:
        (source,) = sources(Drawing(), 1)
        found = []
        for (piece,) in source.epoch(epoch):
            random.random(), np.random.random(), torch.rand(3)
            found += source.fetch(piece).tolist()
        return found

    assert drawn(0) == drawn(0)
    assert len({*drawn(0), *drawn(1)}) == 12
    (source,) = sources(Drawing(), 1)
    assert source.peek(3).tolist() == drawn(0)[:3]
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    list(source.epoch(1))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_steps_of_an_iterable_do_not_read_the_state_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and writing it took 0.1 ms per step, although most iterables draw nothing."""
    (source,) = sources([NUMBERS[:12]] * 4, 1)
    steps = source.epoch(0)
    next(steps)
    monkeypatch.setattr(np.random, "get_state", None)
    monkeypatch.setattr(np.random, "set_state", None)
    assert len(list(steps)) == 3


class RandomBatches(IterableDataset[Tensor]):
    """Global batches of random numbers."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(3):
            yield torch.tensor([random.random(), np.random.random(), float(torch.rand(()))], dtype=torch.float64)


def test_worker_processes_of_an_iterable_draw_the_same_numbers_on_all_ranks() -> None:
    found = []
    for rank in range(2):
        torch.manual_seed(rank)
        loader = DataLoader(RandomBatches(), batch_size=None, num_workers=1)
        (source,) = sources(loader, 1)
        found.append([source.fetch(piece).tolist() for epoch in (0, 1) for (piece,) in source.epoch(epoch)])
        assert source.peek(3).tolist() == found[0][0]
    assert found[0] == found[1]
    assert found[0][:3] != found[0][3:]


def test_a_batch_of_more_targets_than_inputs_is_not_split() -> None:
    flat = (NUMBERS[:12].view(6, 2), NUMBERS[:12])
    with pytest.raises(WorkloadError, match="a batch has 6 inputs and 12 targets, so it cannot be split"):
        list(sources([flat], 2)[0].epoch(0))
    assert len(list(sources([flat], 1)[0].epoch(0))) == 1, "one process trains it whole"


def test_a_failure_in_a_worker_process_is_the_data_sets() -> None:
    class Failing(Items):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise OSError("file 5 is truncated")

    source = make_source(DataLoader(Failing(), num_workers=1), share_of(0, 1), batch=8, seed=SEED)
    with pytest.raises(WorkloadError, match="a worker process of the DataLoader failed: OSError: file 5 is"):
        next(source.epoch(0))


def test_a_batch_larger_than_the_data_is_all_of_it() -> None:
    (source,) = sources(NUMBERS, 1, batch=1000)
    assert (source.batch, source.steps_per_epoch(), source.dropped) == (SIZE, 1, 0)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("chunk", [1, 25, 1000])
def test_batches_that_are_made_together_are_the_same(monkeypatch: pytest.MonkeyPatch, workers: int, chunk: int) -> None:
    """On a GPU the images of several steps are augmented at once."""
    monkeypatch.setattr(batches, "CHUNK_SAMPLES", chunk)
    pixels = torch.randint(256, (SIZE, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = ImageSet(
        name="noise",
        images=pixels,
        labels=NUMBERS % 10,
        classes=10,
        mean=(0.5,) * 3,
        std=(0.2,) * 3,
        crop_padding=2,
        flip=True,
        cutout=3,
    )
    for rank in range(workers):
        one_by_one = make_source(images, Share(rank, workers, 2, CPU), batch=BATCH, seed=SEED)
        assert isinstance(one_by_one, IndexedSource)
        together = ChunkedSource(one_by_one._samples, one_by_one._sampler, one_by_one.share)
        for start in (START, Position(step=1, epoch_samples=BATCH)):
            pairs = zip(one_by_one.epoch(1, start), together.epoch(1, start), strict=True)
            for ours, theirs in pairs:
                assert [(one.samples, one.weight) for one in ours] == [(one.samples, one.weight) for one in theirs]
                for one, other in zip(ours, theirs, strict=True):
                    for left, right in zip(one_by_one.fetch(one), together.fetch(other), strict=True):
                        assert torch.equal(left, right)


@pytest.mark.gpu
def test_a_user_s_batches_reach_a_gpu_unchanged() -> None:
    """Also if the copy begins late: the stream that trains must wait for it."""
    gpu = torch.device("cuda", 0)
    for data in (PAIRS, Items(), DataLoader(Items(), batch_size=BATCH, num_workers=1)):
        expected = make_source(data, Share(0, 1, 1, CPU), batch=BATCH, seed=SEED)
        found = make_source(data, Share(0, 1, 1, gpu), batch=BATCH, seed=SEED)
        for ours, theirs in zip(expected.epoch(0), found.epoch(0), strict=True):
            delay_copies(gpu)
            for left, right in zip(expected.fetch(ours[0]), found.fetch(theirs[0]), strict=True):
                assert right.device == gpu
                assert torch.equal(left, right.cpu())
