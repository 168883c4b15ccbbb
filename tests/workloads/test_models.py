"""Tests of the built-in models: their sizes, and images of many shapes."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.workloads.models import MODELS
from paceline.workloads.names import MODEL_NAMES

PARAMETERS = {"cnn": 53_762, "vgg11": 9_231_114, "resnet18": 11_173_962}


def test_names_and_models_agree() -> None:
    assert tuple(MODELS) == MODEL_NAMES
    assert MODELS.keys() == PARAMETERS.keys()


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_parameters(name: str, parameters: int) -> None:
    model = MODELS[name]((3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("shape", "classes"), [((3, 32, 32), 10), ((1, 32, 32), 2), ((3, 48, 40), 7), ((4, 33, 65), 10), ((3, 40, 32), 100)]
)
def test_other_shapes_and_classes(name: str, shape: tuple[int, int, int], classes: int) -> None:
    with torch.no_grad():
        assert MODELS[name](shape, classes)(torch.randn(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = MODELS[name]((1, 32, 32), 10)
    model(torch.randn(2, 1, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(("name", "side"), [("cnn", 8), ("vgg11", 32), ("resnet18", 1)])
def test_the_smallest_images(name: str, side: int) -> None:
    model = MODELS[name]((1, side, side), 3).eval()
    assert model(torch.randn(2, 1, side, side)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "shape"), [("cnn", (1, 7, 9)), ("cnn", (1, 9, 7)), ("vgg11", (3, 31, 64)), ("vgg11", (3, 64, 31))]
)
def test_images_that_are_too_small(name: str, shape: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot process images of {shape[1]}×{shape[2]}") as caught:
        MODELS[name](shape, 10)
    assert "or larger" in (caught.value.hint or "")


def test_cnn_is_what_its_docstring_says() -> None:
    model = MODELS["cnn"]((3, 32, 32), 10)
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes == [(6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,), (64, 784), (64,), (10, 64), (10,)]
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize(("name", "norms"), [("vgg11", 8), ("resnet18", 20)])
def test_the_others_normalise_every_convolution(name: str, norms: int) -> None:
    modules = list(MODELS[name]((3, 32, 32), 10).modules())
    assert sum(isinstance(module, torch.nn.BatchNorm2d) for module in modules) == norms
    assert sum(isinstance(module, torch.nn.Conv2d) for module in modules) == norms
