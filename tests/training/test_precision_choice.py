"""Tests of `--precision auto`: what is chosen, agreement of ranks, and what runs record; with real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn

from paceline.analysis.steps.timing import losses_of
from paceline.comm import Comm, World
from paceline.config import RunConfig
from paceline.config.recipe import Recipe
from paceline.measure import bf16_instructions
from paceline.records import RunFolder, read_run
from paceline.records.precision import PrecisionChoice
from paceline.records.precision_file import add_choice, read_choices
from paceline.training import precision_choice
from paceline.training.precision_choice import Passes, loss_difference
from paceline.training.run import run
from paceline.workloads.workload import Workload
from ranks import SIZE, Pool

pytestmark = pytest.mark.takes(8)

HERE = __name__
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1) % 3


def vectors() -> Workload:
    """Return a model without images, whose recipe asks for auto."""
    return Workload(model=nn.Linear(4, 3), train=(X, Y), loss=F.cross_entropy, recipe=Recipe(precision="auto"))


def images() -> Workload:
    """Return a model of images with buffers and dropout."""
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 3)]
    return Workload(model=nn.Sequential(*layers), train=(IMAGES, Y), loss=F.cross_entropy)


class OnlyFloat32(nn.Linear):
    """Layer that has no kernel for bf16."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.dtype == torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")
        return out


def only_float32() -> Workload:
    return Workload(model=OnlyFloat32(4, 3), train=(X, Y), loss=F.cross_entropy)


def read_once() -> Workload:
    return Workload(model=nn.Linear(4, 3), train=iter([(X[:8], Y[:8])] * 4), loss=F.cross_entropy)


def train(
    comm: Comm, settings: dict[str, Any], folder: str, forced: list[float] | None = None, flags: str = "avx512_bf16"
) -> None:
    """Train on a processor with these flags; `forced` are the times in fp32 and bf16 that this rank measures."""
    world = World(
        comm.rank, SIZE, local_rank=comm.rank, local_size=SIZE, interface="lo", ranks_sharing_cores=1,
        store=dist.HashStore(),
    )  # fmt: skip
    own = Path(folder) / f"cpuinfo-{comm.rank}"
    own.write_text(f"processor\t: 0\nflags\t\t: fpu {flags if comm.rank else 'avx512_bf16'}\n")
    config = RunConfig(**{"batch": 16, "steps": 3, "events": False, "evaluate": False, "device": "cpu"} | settings)
    times = {"cpu_s": forced[comm.rank : comm.rank + 2]} if forced else {}
    measure = Passes.run
    with (
        patch.object(bf16_instructions, "CPU_INFO", own),
        patch.object(Passes, "run", lambda *args, **options: replace(measure(*args, **options), **times)),
    ):
        run(config, world, RunFolder(Path(folder)), threads=1, precision_file=Path(folder) / "precision.json")


def trained(pool: Pool, folder: Path, name: str, *more: Any, **settings: Any) -> Any:
    folder = RunFolder.create(folder).path
    pool.run(train, SIZE, {"workload": f"{HERE}:{name}", **settings}, str(folder), *more)
    return read_run(folder)


def choice_of(record: Any) -> PrecisionChoice:
    found = record.topology.precision_choice
    assert isinstance(found, PrecisionChoice)
    assert record.config["precision"] == record.topology.precision == found.precision
    assert record.config["channels_last"] == found.channels_last
    return found


@pytest.mark.parametrize(("name", "layout"), [("vectors", False), ("images", True)])
def test_the_faster_format_trains_as_if_it_had_been_given(pool: Pool, tmp_path: Path, name: str, layout: bool) -> None:
    fast, slow = [float(SIZE + 1 - rank) for rank in range(SIZE + 1)], [1.0] * (SIZE + 1)
    chosen = trained(pool, tmp_path / "chosen", name, fast, precision="auto")
    given = trained(pool, tmp_path / "given", name, precision="bf16", channels_last=layout)
    choice = choice_of(chosen)
    assert not choice.error, choice.error
    assert (choice.precision, choice.channels_last, choice.reason, choice.error) == ("bf16", layout, "faster", "")
    assert choice.speedup == pytest.approx((SIZE + 1) / SIZE)  # Rank 0 is the slowest in both.
    assert given.topology.precision_choice is None
    assert losses_of(chosen) == losses_of(given)
    stays = trained(pool, tmp_path / "stays", name, slow, precision="auto")
    plain = trained(pool, tmp_path / "plain", name, precision="fp32")
    assert (choice_of(stays).precision, choice_of(stays).reason) == ("fp32", "not_faster")
    assert losses_of(stays) == losses_of(plain)


@pytest.mark.parametrize(
    ("name", "reason", "flags"),
    [
        ("only_float32", "bf16_failed", "avx512_bf16"),
        ("read_once", "unmeasured", "avx512_bf16"),
        ("vectors", "no_instructions", "avx2"),
    ],
)
def test_fp32_is_taken_where_bf16_cannot_be(pool: Pool, tmp_path: Path, name: str, reason: str, flags: str) -> None:
    settings = {"batch": 8} if name == "read_once" else {}
    choice = choice_of(trained(pool, tmp_path / "run", name, None, flags, precision="auto", **settings))
    assert (choice.precision, choice.reason, choice.speedup) == ("fp32", reason, None)
    assert ("BFloat16" in choice.error) == (name == "only_float32")


def test_a_recipe_may_ask_for_auto_and_a_measurement_is_recorded(pool: Pool, tmp_path: Path) -> None:
    choice = choice_of(trained(pool, tmp_path / "run", "vectors"))
    assert choice.reason in ("faster", "not_faster")
    assert choice.speedup is not None
    assert choice.samples == -(-16 // SIZE)
    assert choice.passes >= precision_choice.LEAST_ROUNDS
    assert choice.loss_difference is not None
    assert choice.loss_difference < precision_choice.LOSS_TOLERANCE


def test_a_choice_of_the_folder_holds(pool: Pool, tmp_path: Path) -> None:
    record = trained(pool, tmp_path / "run", "images", [1.0] * (SIZE + 1), precision="auto")
    file = tmp_path / "run" / "precision.json"
    (key,) = read_choices(file)
    other = RunFolder.create(tmp_path / "other").path
    add_choice(other / "precision.json", key, choice_of(record))
    again = trained(
        pool, other, "images", [2.0**-rank for rank in range(SIZE + 1)], precision="auto", batch=8, strategy="allreduce"
    )
    assert choice_of(again) == choice_of(record)


def test_a_damaged_file_has_no_choices(tmp_path: Path) -> None:
    (tmp_path / "precision.json").write_text("{")
    assert read_choices(tmp_path / "precision.json") == {}
    assert read_choices(tmp_path / "missing.json") == {}


@pytest.mark.parametrize(
    ("fp32", "bf16", "expected"),
    [
        ([2.0, 2.0], [2.1, 2.1], (0.05, 0.0)),
        ([2.0, 3.0], [2.5, 2.5], (0.0, 0.4)),
        ([2.0], [None], (None, 0.0)),
        ([0.0], [0.0], (0.0, 0.0)),
    ],
)
def test_difference_of_losses(fp32: list[Any], bf16: list[Any], expected: tuple[float | None, float]) -> None:
    difference, spread = loss_difference(fp32, bf16)
    assert difference == (None if expected[0] is None else pytest.approx(expected[0]))
    assert spread == pytest.approx(expected[1])
