"""Tests of settings without effect: refused if the user gave them, silent if a default recipe has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.cli.main import run
from paceline.config import LaunchConfig, RunConfig
from paceline.config.recipe import Recipe
from paceline.errors import UsageError
from paceline.experiments.names import check_names
from paceline.workloads import data
from paceline.workloads.given_settings import check_built_in, check_needed, check_recipe, check_replaced
from paceline.workloads.load import load_workload
from paceline.workloads.models import MODELS
from paceline.workloads.names import RESIDUAL_MODELS
from paceline.workloads.workload import Workload
from paceline.workloads.zero_gamma import zero_gamma

SMALL = "synthetic:size=64,test_size=16"
MOMENTUM = "leave it out, or use an optimiser with momentum: sgd, lars, muon"


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        (
            {"cutout": 8},
            "--cutout has no effect: the data set digits is not augmented.",
            "leave it out, or use a data set with augmentation: cifar10, svhn",
        ),
        (
            {"cutout": 8, "data": "cifar10", "augment": False},
            "--cutout has no effect: --no-augment was given.",
            "leave one of the two out",
        ),
        (
            {"optimizer": "adamw", "momentum": 0.8},
            "--momentum has no effect on adamw, which has no such setting.",
            MOMENTUM,
        ),
        (
            {"optimizer": "lamb", "momentum": 0.0},
            "--momentum has no effect on lamb, which has no such setting.",
            MOMENTUM,
        ),
        (
            {"lr": 0.1, "reference_batch": 512},
            "--reference-batch has no effect, since the learning rate is not scaled with the batch.",
            "add --scale-lr linear or --scale-lr sqrt, or leave it out",
        ),
        (
            {"zero_gamma": True},
            "--zero-gamma has no effect: cnn has no residual blocks.",
            "leave it out, or use a model with residual blocks: resnet18",
        ),
        (
            {"tta": "mirror"},
            "--tta mirror was given, but in the data set digits a mirror image has another class or none.",
            "leave --tta out",
        ),
        (
            {"tta": "mirror", "data": "svhn:extra=true"},
            "--tta mirror was given, but in the data set svhn:extra=true a mirror image has another class or none.",
            "leave --tta out",
        ),
    ],
)
def test_an_option_without_effect_is_refused_before_ranks_start(
    settings: dict[str, object], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_names(RunConfig(**settings))  # type: ignore[arg-type]
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    "settings",
    [
        {"workload": "resnet18"},
        {"cutout": 0},
        {"cutout": 8, "data": "cifar10"},
        {"cutout": 8, "data": "svhn:extra=true"},
        {"optimizer": "adamw"},
        {"optimizer": "muon", "momentum": 0.8},
        {"reference_batch": 512},
        {"lr": 0.1, "reference_batch": 512, "scale_lr": "linear"},
        {"workload": "resnet18", "zero_gamma": True},
        {"zero_gamma": False},
        {"augment": False},
    ],
)
def test_settings_with_an_effect_and_defaults_are_accepted(settings: dict[str, object]) -> None:
    check_names(RunConfig(**settings))  # type: ignore[arg-type]


def test_a_recipe_file_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('optimizer = "adamw"\nmomentum = 0.8\n')
    with pytest.raises(UsageError, match=r"^momentum in mine.toml has no effect on adamw"):
        check_names(RunConfig(recipe="mine.toml"))
    Path("cut.toml").write_text("cutout = 4\n")
    with pytest.raises(UsageError, match=r"^cutout in cut.toml has no effect: the data set digits is not augmented"):
        check_names(RunConfig(recipe="cut.toml"))
    Path("sgd.toml").write_text('momentum = 0.8\nreference_batch = 128\nscale_lr = "linear"\n')
    check_names(RunConfig(recipe="sgd.toml"))
    check_names(RunConfig(recipe="sgd.toml", optimizer="adamw"))  # Another optimiser brings its own settings.
    check_names(RunConfig(recipe="sgd.toml", lr=0.3))  # A learning rate alone is used as given.


def test_the_recipe_of_a_workload_decides_what_has_an_effect() -> None:
    given = RunConfig(workload="mine:make", momentum=0.8)
    check_recipe(given)
    with pytest.raises(UsageError, match="--momentum has no effect on adamw"):
        check_recipe(given, Recipe(optimizer="adamw"))
    scaled = RunConfig(workload="mine:make", reference_batch=64)
    check_recipe(scaled, Recipe(scale_lr="sqrt"))
    with pytest.raises(UsageError, match="--reference-batch has no effect"):
        check_recipe(scaled, Recipe())


def own_workload(*, optimizer: bool = False, scheduler: bool = False) -> Workload:
    """Return a workload, with an optimizer or a scheduler of its own."""
    return Workload(
        model=nn.Linear(4, 3),
        train=(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)),
        loss=F.cross_entropy,
        optimizer=(lambda named: torch.optim.SGD(named, lr=0.1)) if optimizer else None,
        scheduler=(lambda made, _: torch.optim.lr_scheduler.ConstantLR(made)) if scheduler else None,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw"},
        {"lr": 0.1},
        {"scale_lr": "linear"},
        {"reference_batch": 8},
        {"momentum": 0.5},
        {"nesterov": True},
        {"weight_decay": 0.0},
    ],
)
def test_settings_of_the_optimizer_are_refused_where_the_workload_has_its_own(settings: dict[str, object]) -> None:
    config = RunConfig(workload="mine:make", **settings)  # type: ignore[arg-type]
    name = next(iter(settings))
    check_replaced(config, own_workload(scheduler=True))
    with pytest.raises(UsageError) as caught:
        check_replaced(config, own_workload(optimizer=True))
    option = f"--{name.replace('_', '-')}"
    assert caught.value.message == f"{option} has no effect: mine:make has its own optimizer."
    assert f"use config.{name} there" in (caught.value.hint or "")


@pytest.mark.parametrize("settings", [{"schedule": "constant"}, {"warmup_epochs": 0.0}, {"warmup_steps": 5}])
def test_settings_of_the_schedule_are_refused_where_the_workload_has_its_own(settings: dict[str, object]) -> None:
    config = RunConfig(workload="mine:make", **settings)  # type: ignore[arg-type]
    check_replaced(config, own_workload(optimizer=True))
    with pytest.raises(UsageError, match="has no effect: mine:make has its own scheduler"):
        check_replaced(config, own_workload(scheduler=True))


@pytest.mark.parametrize(("settings", "option"), [({"data": "svhn"}, "--data"), ({"augment": False}, "--no-augment")])
def test_settings_of_the_data_are_refused_for_a_users_workload(settings: dict[str, object], option: str) -> None:
    check_replaced(RunConfig(workload="mine:make"), own_workload())
    with pytest.raises(UsageError, match=rf"^{option} has no effect: mine:make has its own data"):
        check_replaced(RunConfig(workload="mine:make", **settings), own_workload())  # type: ignore[arg-type]


OWN = """
import torch
from paceline import Workload

def fixed():
    return make(0.1)

def configured(config):
    return make(config.lr)

def make(lr):
    data = (torch.randn(8, 2), torch.randn(8, 1))
    return Workload(model=torch.nn.Linear(2, 1), train=data, loss=torch.nn.functional.mse_loss,
                    optimizer=lambda named: torch.optim.SGD(named, lr=lr))
"""


def test_a_function_that_takes_the_config_may_use_any_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("given_settings_own.py").write_text(OWN)
    made = load_workload(RunConfig(workload="given_settings_own:configured", lr=0.7))
    assert made.optimizer is not None
    assert made.optimizer(made.model.named_parameters()).param_groups[0]["lr"] == 0.7
    assert run(["compare", "given_settings_own:fixed", "--lr", "0.7", "--ranks", "2"]) == 2
    shown = capsys.readouterr().err
    assert "error: --lr has no effect: given_settings_own:fixed has its own optimizer." in shown


def test_names_say_which_data_is_augmented_and_which_models_are_residual() -> None:
    train, _ = data.load(SMALL, data_dir=Path())
    assert data.is_augmented(SMALL) == (train.crop_padding > 0 or train.flip)
    for name, make in MODELS.items():
        model = make((3, 32, 32), 10)
        if name in RESIDUAL_MODELS:
            zero_gamma(model)
        else:
            with pytest.raises(UsageError, match="no residual block"):
                zero_gamma(model)
    with pytest.raises(UsageError, match="--cutout has no effect"):
        check_built_in(RunConfig(data=SMALL, cutout=4))


@pytest.mark.parametrize("option", [("--keep", "3"), ("--on-checkpoint-error", "stop"), ("--grace", "5")])
def test_settings_of_checkpoints_without_checkpoints(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "cnn", *option]) == 2
    said = capsys.readouterr().err
    assert f"error: {option[0]} has no effect without --checkpoint-every." in said
    assert "hint: add --checkpoint-every, or leave it out" in said


def test_settings_of_checkpoints_with_checkpoints() -> None:
    check_needed(RunConfig(keep=3, checkpoint_every="10", checkpoint="off"), LaunchConfig(grace=5))
