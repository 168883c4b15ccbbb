"""Tests of the memory layout of models: weights of images and of volumes, and inputs that are neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.analysis.steps.timing import losses_of
from paceline.comm import Comm, World
from paceline.config import RunConfig
from paceline.experiments.training_targets import read_parity
from paceline.records import RunFolder, read_run
from paceline.training.model_format import move_model
from paceline.training.parity.task import prove_run
from paceline.training.run import run
from paceline.workloads.workload import Workload
from ranks import SIZE, Pool

pytestmark = pytest.mark.takes(5)


class Frames(nn.Module):
    """Model of videos, which applies a convolution to each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.frame, self.last = nn.Conv2d(2, 4, 3), nn.Linear(36, 3)

    def forward(self, videos: Tensor) -> Tensor:
        """Return the mean of the frames' outputs; `view` needs contiguous videos."""
        frames = self.frame(videos.view(-1, *videos.shape[2:])).flatten(1)
        return self.last(frames).view(*videos.shape[:2], 3).mean(1)


def workload(model: nn.Module, *shape: int) -> Workload:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, *shape, generator=generator), torch.randint(0, 3, (32,), generator=generator)
    return Workload(model=model, train=(x, y), loss=F.cross_entropy)


def volumes() -> Workload:
    layers = [nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 3, 2), nn.Flatten(), nn.Linear(24, 3)]
    return workload(nn.Sequential(*layers), 2, 5, 5, 5)


def images_and_volumes() -> Workload:
    layers = [nn.Conv2d(2, 4, 3), nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 4, 2), nn.Flatten(), nn.Linear(16, 3)]
    return workload(nn.Sequential(*layers), 2, 5, 5)


def frames() -> Workload:
    return workload(Frames(), 6, 2, 5, 5)


def sequences() -> Workload:
    return workload(nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(12, 3)), 2, 5)


def test_each_weight_has_the_layout_of_its_dimensions() -> None:
    model = nn.ModuleList([nn.Conv1d(2, 4, 3), nn.Conv2d(2, 4, 3), nn.Conv3d(2, 4, 3), nn.Linear(4, 3)])
    model.register_buffer("mask", torch.ones(2, 2, 4, 3, 2))
    before = [tensor.clone() for tensor in model.state_dict().values()]
    move_model(model, RunConfig(channels_last=True, precision="fp64"), torch.device("cpu"))
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    for tensor in (model[2].weight, model.mask):
        assert tensor.is_contiguous(memory_format=torch.channels_last_3d)
        assert not tensor.is_contiguous()
    assert model[0].weight.is_contiguous()
    for tensor, value in zip(model.state_dict().values(), before, strict=True):
        torch.testing.assert_close(tensor, value.double(), rtol=0, atol=0)


def prove_and_train(comm: Comm, name: str, strategy: str, folders: list[str]) -> None:
    """Prove with the layout, and train with and without it."""
    proof, plain, converted = (RunFolder(Path(folder)) for folder in folders)
    for folder in (proof, plain, converted):
        world = World(
            comm.rank, SIZE, local_rank=comm.rank, local_size=SIZE, interface="lo", ranks_sharing_cores=1,
            store=dist.HashStore(),
        )  # fmt: skip
        settings: dict[str, Any] = {"channels_last": folder is not plain, "precision": "fp64", "device": "cpu"}
        settings |= {"batch": 16, "steps": 4, "evaluate": False, "events": False, "deterministic": True}
        config = RunConfig(workload=f"{__name__}:{name}", strategy=strategy, **settings)
        (prove_run if folder is proof else run)(config, world, folder, threads=1)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("volumes", "allreduce"), ("images_and_volumes", "shared_memory"), ("frames", "ddp"), ("sequences", "ddp")],
)
def test_channels_last_trains_the_same(pool: Pool, tmp_path: Path, name: str, strategy: str) -> None:
    folders = [str(RunFolder.create(tmp_path / kind).path) for kind in ("proof", "plain", "converted")]
    pool.run(prove_and_train, SIZE, name, strategy, folders)
    parity = read_parity(Path(folders[0]))
    assert parity is not None
    assert parity.holds
    plain, converted = (losses_of(read_run(Path(folder))) for folder in folders[1:])
    assert len(plain) == 4
    assert converted == pytest.approx(plain, rel=1e-9)
