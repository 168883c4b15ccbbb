"""Tests of batches against a slow implementation for single images, and of their independence of the batch."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.workloads.data.images import ImageSet
from paceline.workloads.data.sample_random import draw_below


def make_set(
    shape: tuple[int, int, int] = (3, 32, 32), count: int = 40, *, pad: int = 4, flip: bool = True, **options: Any
) -> ImageSet:
    generator = torch.Generator().manual_seed(1)
    channels = shape[0]
    return ImageSet(
        name="test",
        images=torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator),
        labels=torch.randint(0, 10, (count,), generator=generator),
        classes=10,
        mean=tuple(0.3 + 0.1 * c for c in range(channels)),
        std=tuple(0.2 + 0.05 * c for c in range(channels)),
        crop_padding=pad,
        flip=flip,
        **options,
    )


def one_image(data: ImageSet, index: int, seed: int, epoch: int | None) -> torch.Tensor:
    """Return what `batch` should return for one sample, in float64: mirror, pad, crop, scale."""
    pixels = data.images[index]
    if epoch is not None and (data.flip or data.crop_padding):
        pad, places = data.crop_padding, 2 * data.crop_padding + 1
        choice = draw_below((1 + data.flip) * places**2, torch.tensor([index]), seed=seed, epoch=epoch).item()
        mirrored, rest = divmod(int(choice), places**2)
        top, left = divmod(rest, places)
        if mirrored:
            pixels = pixels.flip(-1)
        _, height, width = pixels.shape
        padded = torch.nn.functional.pad(pixels[None].double(), (pad,) * 4, mode=data.padding_mode)[0]
        pixels = padded[:, top : top + height, left : left + width]
    mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (data.mean, data.std))
    return (pixels.double() / 255 - mean) / std


shapes = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes | st.sampled_from([(3, 32, 32), (1, 28, 28)]),
    pad=st.integers(0, 5),
    reflects=st.booleans(),
    flip=st.booleans(),
    channels_last=st.booleans(),
    epoch=st.none() | st.integers(0, 100),
    seed=st.integers(0, 2**40),
    indices=st.lists(st.integers(0, 39), min_size=1, max_size=12),
)
def test_batch_equals_one_image_at_a_time(
    shape: tuple[int, int, int],
    pad: int,
    reflects: bool,
    flip: bool,
    channels_last: bool,
    epoch: int | None,
    seed: int,
    indices: list[int],
) -> None:
    mode = "reflect" if reflects and pad < min(shape[1:]) else "constant"
    data = make_set(shape, pad=pad, flip=flip, padding_mode=mode)
    images, labels = data.batch(torch.tensor(indices), seed=seed, epoch=epoch, channels_last=channels_last)
    assert images.shape == (len(indices), *shape)
    assert images.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert torch.equal(labels, data.labels[indices])
    expected = torch.stack([one_image(data, index, seed, epoch) for index in indices])
    torch.testing.assert_close(images.double(), expected, rtol=0, atol=2e-6)


@settings(deadline=None)
@given(order=st.permutations(range(20)), ranks=st.integers(1, 5))
def test_a_sample_is_the_same_in_any_batch(order: list[int], ranks: int) -> None:
    data = make_set()
    whole, _ = data.batch(torch.arange(20), seed=3, epoch=2)
    for rank in range(ranks):
        mine = torch.tensor(order[rank::ranks])
        images, _ = data.batch(mine, seed=3, epoch=2)
        assert torch.equal(images, whole[mine])


def test_augmentation_changes_with_epoch_seed_and_sample() -> None:
    data = make_set()
    same = dataclasses.replace(data, images=data.images[:1].expand(40, -1, -1, -1).contiguous())
    images, _ = same.batch(torch.arange(40), seed=1, epoch=1)
    assert len(images.flatten(1).unique(dim=0)) > 30  # of 162 looks

    indices = torch.arange(40)
    batches = [data.batch(indices, seed=seed, epoch=epoch)[0] for seed, epoch in [(1, 1), (1, 2), (2, 1)]]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        unchanged = (batches[one] == batches[other]).flatten(1).all(1).sum()
        assert unchanged < 5


def test_crops_and_flips_are_uniform() -> None:
    """Crops of images with numbered pixels show their offsets: all offsets are equally frequent."""
    count, pad, side = 8_100, 1, 4
    numbered = torch.arange(1, side * side + 1, dtype=torch.uint8).view(1, 1, side, side)
    data = dataclasses.replace(make_set((1, side, side), count, pad=pad), images=numbered.repeat(count, 1, 1, 1))
    images, _ = data.batch(torch.arange(count), seed=5, epoch=0)
    looks, frequencies = images.flatten(1).unique(dim=0, return_counts=True)
    assert len(looks) == 2 * 3 * 3
    assert frequencies.min() > 450 - 110  # five deviations
    assert frequencies.max() < 450 + 110


@pytest.mark.parametrize("seed", [0, 1])
def test_cuts_are_whole_squares_at_places_that_do_not_depend_on_crop_and_flip(seed: int) -> None:
    """A pixel of the corner marks the flip; the colour of the mean marks the cut."""
    count, side = 4000, 8
    pixels = torch.zeros(count, 1, 32, 32, dtype=torch.uint8)
    pixels[:, :, :, :16] = 255
    images = ImageSet(
        name="halves",
        images=pixels,
        labels=torch.zeros(count, dtype=torch.int64),
        classes=2,
        mean=(100 / 255,),
        std=(1.0,),
        flip=True,
        cutout=side,
    )
    batch, _ = images.batch(torch.arange(count), seed=seed, epoch=0)
    cut = (batch[:, 0] - 0).abs() < 1e-6
    rows, columns = cut.any(2).sum(1), cut.any(1).sum(1)
    assert torch.equal(cut.sum((1, 2)), rows * columns), "each cut is a rectangle"
    assert rows.max() == columns.max() == side
    assert rows.min() >= side // 2, "at an edge, half of the square is outside"
    places = torch.arange(32.0)
    centres = (cut.any(2) * places).sum(1) / rows
    mirrored = (batch[:, 0, 0, 31] > 0).double()
    assert 0.45 < float(mirrored.mean()) < 0.55
    assert abs(float(torch.corrcoef(torch.stack([centres.double(), mirrored]))[0, 1])) < 0.06
    plain, _ = images.batch(torch.arange(count), seed=seed, epoch=None)
    assert not ((plain[:, 0] - 0).abs() < 1e-6).any(), "nothing is cut out of test images"


@pytest.mark.parametrize("pad", [0, 2])
def test_alternating_flips_mirror_every_image_in_one_of_two_epochs(pad: int) -> None:
    count = 4000
    data = make_set((1, 4, 16), count, pad=pad, alternate_flip=True)
    sides = torch.zeros(count, 1, 4, 16, dtype=torch.uint8)
    sides[..., 8:] = 255  # The right half is bright, and most of that of a crop.
    data = dataclasses.replace(data, images=sides)

    def mirrored(epoch: int) -> torch.Tensor:
        images, _ = data.batch(torch.arange(count), seed=3, epoch=epoch)
        return images[..., :8].sum((1, 2, 3)) > images[..., 8:].sum((1, 2, 3))

    epochs = [mirrored(epoch) for epoch in range(4)]
    assert 0.45 < float(epochs[0].double().mean()) < 0.55, "half of them, in any epoch"
    assert torch.equal(epochs[1], ~epochs[0])
    assert torch.equal(epochs[2], epochs[0])
    assert torch.equal(epochs[3], epochs[1])
    first, _ = data.batch(torch.arange(count), seed=3, epoch=0)
    third, _ = data.batch(torch.arange(count), seed=3, epoch=2)
    assert torch.equal(first, third) == (pad == 0), "crops are drawn anew"


def test_no_augmentation_for_evaluation_or_without_need() -> None:
    data = make_set()
    plain = make_set(pad=0, flip=False)
    indices = torch.arange(40)
    evaluated, _ = data.batch(indices, seed=1, epoch=None)
    assert torch.equal(evaluated, plain.batch(indices, seed=1, epoch=7)[0])
    assert not torch.equal(evaluated, data.batch(indices, seed=1, epoch=7)[0])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_narrow_types_are_rounded_once(dtype: torch.dtype, channels_last: bool) -> None:
    data = make_set()
    indices = torch.arange(40)
    images, _ = data.batch(indices, seed=1, epoch=1, dtype=dtype, channels_last=channels_last)
    reference, _ = data.batch(indices, seed=1, epoch=1)
    assert images.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(images, reference.double(), rtol=0, atol=2e-6)
    else:
        assert torch.equal(images, reference.to(dtype))


def test_batches_do_not_share_memory_with_the_set() -> None:
    data = make_set()
    before = data.images.clone(), data.labels.clone()
    images, labels = data.batch(torch.arange(5), seed=1, epoch=1)
    images.zero_()
    labels.fill_(-1)
    assert torch.equal(data.images, before[0])
    assert torch.equal(data.labels, before[1])


@pytest.mark.parametrize("channels_last", [False, True])
def test_an_empty_batch_is_empty(channels_last: bool) -> None:
    """A rank may have no samples left."""
    images, labels = make_set().batch(torch.arange(0), seed=1, epoch=1, channels_last=channels_last)
    assert images.shape == (0, 3, 32, 32)
    assert labels.shape == (0,)


def test_moving_keeps_everything_else() -> None:
    data = make_set()
    moved = data.to("meta")
    assert (moved.images.device.type, moved.labels.device.type) == ("meta", "meta")
    assert (len(moved), moved.mean, moved.crop_padding, moved.flip) == (40, data.mean, 4, True)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_are_the_same_on_a_gpu(channels_last: bool) -> None:
    data, indices = make_set(), torch.arange(39, -1, -1)
    here, _ = data.batch(indices, seed=1, epoch=1, channels_last=channels_last)
    there, labels = data.to("cuda").batch(indices, seed=1, epoch=1, channels_last=channels_last)
    assert torch.equal(here, there.cpu())
    assert torch.equal(labels.cpu(), data.labels[indices])


@pytest.mark.parametrize(
    "wrong", [{"images": torch.zeros(40, 3, 32, 32)}, {"labels": torch.zeros(39).long()}, {"mean": ()}]
)
def test_tensors_that_do_not_fit_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        dataclasses.replace(make_set(), **wrong)
