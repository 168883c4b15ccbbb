"""Tests of images generated in memory: the same every time, learnable, not trivial."""

import hashlib
from pathlib import Path

import pytest
import torch

from paceline.errors import UsageError
from paceline.workloads import data
from paceline.workloads.data.images import ImageSet

NOWHERE = Path("/nonexistent")


def linear_accuracy(train: ImageSet, test: ImageSet) -> float:
    """Return the accuracy of a ridge regression on pixels, averaged over 4x4 blocks to keep the solver fast."""

    def features(part: ImageSet) -> torch.Tensor:
        images, _ = part.batch(torch.arange(len(part)), seed=0, epoch=None)
        flat = torch.nn.functional.avg_pool2d(images, 4).flatten(1).double()
        return torch.cat([flat, torch.ones(len(flat), 1, dtype=torch.float64)], dim=1)

    x, targets = features(train), torch.nn.functional.one_hot(train.labels, train.classes).double()
    weights = torch.linalg.solve(x.T @ x + 1e-1 * torch.eye(x.shape[1], dtype=torch.float64), x.T @ targets)
    return (features(test) @ weights).argmax(1).eq(test.labels).double().mean().item()


def test_the_bytes_are_the_same_on_every_machine() -> None:
    """Compare with recorded values, which must not depend on the processor or the number of threads."""
    train, test = data.load("synthetic:size=100,test_size=50", data_dir=NOWHERE)
    content = b"".join(part.numpy().tobytes() for part in (train.images, train.labels, test.images, test.labels))
    assert hashlib.sha256(content).hexdigest() == "6bfc10ba77e6223b4c159a83760a4ebd1365f8fac070a18ea1417c6ea5262752"


def test_the_seed_changes_the_images_and_train_is_not_test() -> None:
    one, other = (data.load(f"synthetic:size=60,test_size=60,seed={seed}", data_dir=NOWHERE) for seed in (0, 1))
    assert not torch.equal(one[0].images, other[0].images)
    assert not torch.equal(one[0].images, one[1].images)


def test_a_linear_model_learns_it_but_not_all_of_it() -> None:
    train, test = data.load("synthetic", data_dir=NOWHERE)
    assert (len(train), len(test), train.images.shape[1:]) == (10_000, 2_000, (3, 32, 32))
    assert 0.85 < linear_accuracy(train, test) < 0.98


def test_noise_makes_it_harder() -> None:
    easy, hard = (linear_accuracy(*data.load(f"synthetic:noise={noise}", data_dir=NOWHERE)) for noise in (0.3, 2))
    assert easy > 0.995
    assert 0.3 < hard < 0.7


@pytest.mark.parametrize("shape", ["1x28x28", "3x8x8", "1x1x5", "4x33x20"])
def test_shapes_classes_and_normalisation(shape: str) -> None:
    train, test = data.load(f"synthetic:size=700,test_size=7,shape={shape},classes=3", data_dir=NOWHERE)
    assert train.images.shape == (700, *map(int, shape.split("x")))
    assert len(test) == 7
    assert sorted(set(train.labels.tolist())) == [0, 1, 2]
    images, _ = train.batch(torch.arange(700), seed=0, epoch=0)
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-2)


def test_equal_images_can_be_normalised() -> None:
    train, _ = data.load("synthetic:size=1,shape=1x1x1,noise=0", data_dir=NOWHERE)
    images, _ = train.batch(torch.arange(1), seed=0, epoch=0)
    assert images.isfinite().all()


@pytest.mark.parametrize(
    "wrong", ["shape=32x32", "shape=3x0x32", "size=0", "test_size=0", "classes=1", "noise=-1", "noise=nan", "seed=-1"]
)
def test_values_that_cannot_be_are_named(wrong: str) -> None:
    with pytest.raises(UsageError, match=f"synthetic:{wrong.split('=')[0]}="):
        data.prepare(f"synthetic:{wrong}", data_dir=NOWHERE)
