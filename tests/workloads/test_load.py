"""Tests of loading workloads: built-in models, and a user's with every way in which it can fail."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.config import RunConfig
from paceline.errors import DataError, UsageError, WorkloadError
from paceline.workloads.data.images import ImageSet
from paceline.workloads.load import load_workload
from paceline.workloads.workload import Workload, count_top1

SMALL = "synthetic:size=40,test_size=12,shape=1x12x10,classes=3"
WORKLOAD = """
import torch
from paceline import Workload

def make_workload():
    data = (torch.randn(8, 2), torch.randn(8, 1))
    return Workload(model=torch.nn.Linear(2, 1), train=data, loss=torch.nn.functional.mse_loss)
"""

Own = Callable[[str], str]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Own]:
    """Return a function that writes a user's module into the current folder, under a unique name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "own_" + "".join(c if c.isalnum() else "_" for c in request.node.name)

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return name

    yield write
    sys.modules.pop(name, None)


def load(workload: str, **settings: object) -> Workload:
    return load_workload(RunConfig(workload=workload, **settings))


def weights(workload: Workload) -> Tensor:
    return nn.utils.parameters_to_vector(workload.model.parameters()).detach()


def test_a_built_in_model_fits_its_data() -> None:
    workload = load("cnn", data=SMALL)
    assert workload.name == f"cnn on {SMALL}"
    assert isinstance(workload.train, ImageSet)
    assert isinstance(workload.test, ImageSet)
    assert (len(workload.train), len(workload.test)) == (40, 12)
    batch = workload.train.batch(torch.arange(5), seed=0, epoch=None)
    outcome = workload.forward(workload.model, batch)
    assert outcome.output.shape == (5, 3)
    assert outcome.loss.shape == ()
    counted = workload.count_correct(outcome)
    assert counted is not None
    assert int(counted) == sum(outcome.output.argmax(1) == batch[1])


def test_the_weights_depend_on_the_seed_alone() -> None:
    first = load("cnn", data=SMALL, seed=3)
    torch.rand(10)
    assert torch.equal(weights(load("cnn", data=SMALL, seed=3)), weights(first))
    assert torch.equal(weights(load("cnn", data=SMALL, seed=3, augment=False)), weights(first))
    assert not torch.equal(weights(load("cnn", data=SMALL, seed=4)), weights(first))


def test_the_users_own_weights_depend_on_the_seed_alone(own: Own) -> None:
    name = own(WORKLOAD)
    first = weights(load(f"{name}:make_workload", seed=1))
    assert torch.equal(weights(load(f"{name}:make_workload", seed=1)), first)
    assert not torch.equal(weights(load(f"{name}:make_workload", seed=2)), first)


def test_augmentation_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    images = ImageSet(
        name="x",
        images=torch.zeros(4, 1, 8, 8, dtype=torch.uint8),
        labels=torch.zeros(4, dtype=torch.int64),
        classes=2,
        mean=(0.0,),
        std=(1.0,),
        crop_padding=4,
        flip=True,
    )
    monkeypatch.setattr("paceline.workloads.data.load", lambda *_, **__: (images, images))
    with_it, without = load("cnn").train, load("cnn", augment=False).train
    assert (with_it.crop_padding, with_it.flip) == (4, True)
    assert (without.crop_padding, without.flip) == (0, False)


def test_data_comes_from_the_folder_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for data_dir, folder in (("~/mine", tmp_path / "mine"), ("", tmp_path / ".cache" / "paceline")):
        with pytest.raises(DataError, match=str(folder)):
            load("cnn", data="cifar10", data_dir=data_dir)


def test_an_unknown_workload_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match="there is no workload 'resnet'") as caught:
        load("resnet")
    assert caught.value.hint == "did you mean 'resnet18'? known: cnn, resnet18, vgg11"


def test_an_unknown_data_set_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match="there is no data set 'digit'") as caught:
        load("cnn", data="digit")
    assert "did you mean 'digits'?" in (caught.value.hint or "")


def test_images_too_small_for_the_model_are_refused() -> None:
    with pytest.raises(UsageError, match="vgg11 cannot process images of 12×10"):
        load("vgg11", data=SMALL)


def test_the_users_own(own: Own) -> None:
    name = own(WORKLOAD)
    workload = load(f"{name}:make_workload")
    assert workload.name == f"{name}:make_workload"
    assert isinstance(workload.model, nn.Linear)


def test_the_users_own_may_have_a_name(own: Own) -> None:
    name = own(WORKLOAD.replace("loss=", "name='my task', loss="))
    assert load(f"{name}:make_workload").name == "my task"


def test_the_users_own_may_take_the_configuration(own: Own) -> None:
    name = own(
        WORKLOAD.replace("make_workload()", "make_workload(config)").replace("Linear(2, 1)", "Linear(2, config.batch)")
    )
    workload = load(f"{name}:make_workload", batch=9)
    assert workload.model.out_features == 9


def test_a_function_that_is_not_there_offers_the_nearest(own: Own) -> None:
    name = own(WORKLOAD)
    with pytest.raises(UsageError, match=f"there is no function in '{name}' named 'make_wrkload'") as caught:
        load(f"{name}:make_wrkload")
    assert "did you mean 'make_workload'?" in (caught.value.hint or "")


def test_a_name_that_is_no_function_is_not_called(own: Own) -> None:
    name = own(WORKLOAD + "\nsize = 3\n")
    with pytest.raises(UsageError, match="there is no function in"):
        load(f"{name}:size")


def test_a_function_that_fails_shows_the_users_traceback(own: Own) -> None:
    name = own("def inner():\n    return {}['missing key']\n\ndef make_workload():\n    return inner()\n")
    with pytest.raises(WorkloadError, match=rf"{name}:make_workload\(\) failed: KeyError: 'missing key'") as caught:
        load(f"{name}:make_workload")
    detail = caught.value.detail or ""
    assert detail.startswith("Traceback")
    assert f"{name}.py" in detail
    assert "return {}['missing key']" in detail
    assert caught.value.__suppress_context__


def test_an_error_of_ours_passes_through_a_users_function(own: Own) -> None:
    name = own(WORKLOAD.replace("loss=", "step=print, loss="))
    with pytest.raises(WorkloadError, match="a workload needs either `loss` or `step`") as caught:
        load(f"{name}:make_workload")
    assert caught.value.detail is None


def test_a_function_that_returns_something_else(own: Own) -> None:
    name = own("def make_workload():\n    return 3\n")
    with pytest.raises(WorkloadError, match=r"make_workload\(\) returned a int, not a Workload") as caught:
        load(f"{name}:make_workload")
    assert "paceline.Workload" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_at_all\n", "ModuleNotFoundError"),
        ("def f(:\n", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError"),
    ],
    ids=["import", "syntax", "arithmetic"],
)
def test_a_module_that_fails_on_import(own: Own, source: str, message: str) -> None:
    name = own(source)
    with pytest.raises(WorkloadError, match=f"importing '{name}' failed: {message}") as caught:
        load(f"{name}:make_workload")
    assert f"{name}.py" in (caught.value.detail or "")


def test_a_module_that_is_not_there(own: Own) -> None:
    own("")
    with pytest.raises(UsageError, match="there is no module 'nowhere_to_be_found' in "):
        load("nowhere_to_be_found:make_workload")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": None}, "either `loss` or `step`"),
        ({"step": lambda *_: None}, "either `loss` or `step`"),
        ({"model": "text"}, "the model is a str, not a torch.nn.Module"),
        ({"train": 3}, "the training data is a int"),
    ],
)
def test_a_workload_that_cannot_be(change: dict[str, object], message: str) -> None:
    fine = {"model": nn.Linear(1, 1), "train": torch.ones(3, 1), "loss": nn.functional.mse_loss}
    Workload(**fine)
    with pytest.raises(WorkloadError, match=message):
        Workload(**fine | change)


def test_a_step_has_no_notion_of_right() -> None:
    workload = Workload(model=nn.Linear(1, 1), train=torch.ones(3, 1), step=lambda model, batch: model(batch).sum())
    outcome = workload.forward(workload.model, torch.ones(2, 1))
    assert outcome.loss == workload.model(torch.ones(2, 1)).sum()
    assert workload.count_correct(outcome) is None


def test_a_step_and_right_answers_do_not_go_together() -> None:
    with pytest.raises(WorkloadError, match="`correct` needs the model's output"):
        Workload(
            model=nn.Linear(1, 1), train=torch.ones(3, 1), step=lambda model, _: model.weight.sum(), correct=count_top1
        )


def test_right_answers_of_an_output_that_is_not_a_tensor() -> None:
    workload = Workload(
        model=nn.Identity(),
        train=torch.ones(3, 1),
        loss=lambda output, _: output["logits"].sum(),
        correct=lambda output, target: count_top1(output["logits"], target),
    )
    logits = torch.tensor([[0.0, 1.0]], requires_grad=True)
    outcome = workload.forward(workload.model, ({"logits": logits}, torch.tensor([1])))
    right = workload.count_correct(outcome)
    assert right is not None
    assert int(right) == 1
    assert not right.requires_grad


def test_count_top1() -> None:
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert int(count_top1(logits, torch.tensor([1, 1, 1]))) == 2


def test_a_function_of_keywords_alone_is_not_given_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keywords_alone.py").write_text(
        "import torch, paceline\n"
        "def make(*, width=3, **rest):\n"
        "    model = torch.nn.Linear(1, width)\n"
        "    return paceline.Workload(model=model, train=torch.ones(3, 1), step=lambda m, x: m(x).sum())\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_workload(RunConfig(workload="keywords_alone:make")).model.out_features == 3


DRAWS = """
import random
import numpy
import torch
from paceline import Workload

first = random.random(), numpy.random.rand(), float(torch.rand(1))

def make_workload():
    drawn = torch.tensor([*first, random.random(), numpy.random.rand(), float(torch.rand(1))])
    return Workload(model=torch.nn.Linear(1, 1), train=drawn, step=lambda m, x: m(x[:, None]).mean())
"""


def test_all_random_numbers_of_the_users_module_depend_on_the_seed_alone(own: Own) -> None:
    name = own(DRAWS)
    found = []
    for seed in (1, 1, 2):
        sys.modules.pop(name, None)
        torch.rand(3)
        found.append(load(f"{name}:make_workload", seed=seed).train.tolist())
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])
    assert len(set(found[0])) == 6, "the module and the function draw different numbers"


def test_a_module_that_is_imported_already_gives_the_same(own: Own) -> None:
    """Some ranks have imported it for an earlier run; what the import drew must not matter."""
    name = own(DRAWS)
    assert torch.equal(load(f"{name}:make_workload").train, load(f"{name}:make_workload").train)


X, Y = torch.ones(10, 1), torch.ones(9, 1)


class Parts(TensorDataset):
    """Data set that does not check the lengths of its tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y), "has 10 inputs and 9 targets"),
        ((X, X, Y), "has tensors of 10, 10 and 9 samples"),
        (Parts(X, Y), "has 10 inputs and 9 targets"),
        (DataLoader(Parts(X, Y)), "has 10 inputs and 9 targets"),
        ((X, Y.numpy()), "is a tuple with a ndarray, but its members must all be tensors"),
        ((X, torch.tensor(1.0)), "has a tensor without dimensions"),
        (torch.tensor(1.0), "has a tensor without dimensions"),
        ({"x": X, "y": X}, "is a dict, whose keys are not samples"),
    ],
    ids=["pair", "triple", "subclass", "loader", "array", "scalar", "one scalar", "dict"],
)
@pytest.mark.parametrize("kind", ["train", "test"])
def test_data_whose_parts_do_not_fit(kind: str, data: object, message: str) -> None:
    name = {"train": "training", "test": "test"}[kind]
    fine = {"model": nn.Linear(1, 1), "train": X, "loss": nn.functional.mse_loss}
    with pytest.raises(WorkloadError, match=f"the {name} data {message}") as caught:
        Workload(**fine | {kind: data})
    assert caught.value.hint
