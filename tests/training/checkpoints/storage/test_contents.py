"""A run that continues from a checkpoint equals one that was not interrupted, to the last bit, with every optimiser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.strategies.base.optimizer_state import load_optimizer_state
from paceline.strategies.base.strategy import State
from paceline.training.checkpoints.storage import CheckpointFolder, Loaded, check_keepable, load
from training.checkpoints.storage.states import assert_same, info

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam with a tensor as learning rate": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), amsgrad=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1, t0=2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
}


class Model(nn.Module):
    """A convolution, by default in the layout of channels_last, and a weight that two layers share."""

    def __init__(self, layout: torch.memory_format = torch.channels_last) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.to(memory_format=layout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers."""
        return self.second(torch.tanh(self.first(self.norm(self.convolution(x)).mean(dim=(2, 3)))))


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(step))

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def state_of(model: Model, optimizer: torch.optim.Optimizer) -> State:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return State(dict(model.state_dict()), {names[id(p)]: dict(values) for p, values in optimizer.state.items()})


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def resumed(make: Make, model: Model, loaded: Loaded) -> torch.optim.Optimizer:
    """Load a checkpoint into a new model; return a new optimiser with the state of the checkpoint."""
    optimizer = make(model.parameters())
    model.load_state_dict(loaded.state.model)
    load_optimizer_state(optimizer, model.named_parameters(), loaded.state.optimizer)
    for group, saved in zip(optimizer.param_groups, loaded.param_groups, strict=True):
        group.update(saved)
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:.*Please clone before storing")
def test_training_continues_from_a_checkpoint_to_the_last_bit(name: str, tmp_path: Path) -> None:
    make, layout = OPTIMIZERS[name], torch.contiguous_format if name == "lbfgs" else torch.channels_last
    model, other = Model(layout), Model(layout)
    optimizer = make(model.parameters())
    train(model, optimizer, range(3))
    path = CheckpointFolder(tmp_path).write(state_of(model, optimizer), groups_of(optimizer), info(3))
    loaded = load(path)
    its_optimizer = resumed(make, other, loaded)
    assert_same(groups_of(its_optimizer), groups_of(optimizer))
    assert_same(state_of(other, its_optimizer).optimizer, state_of(model, optimizer).optimizer)
    for one, its_one in ((model, optimizer), (other, its_optimizer)):
        train(one, its_one, range(3, 6))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(state_of(other, its_optimizer).optimizer, state_of(model, optimizer).optimizer)


def test_extra_state_of_modules_is_kept(tmp_path: Path) -> None:
    model = {"layer._extra_state": {"scale": torch.ones(1), "history": [1, 2]}, "layer.weight": torch.ones(2)}
    path = CheckpointFolder(tmp_path).write(State(model, {}), [], info(1))
    assert_same(load(path).state.model, model)


SPARSE = torch.eye(2).to_sparse()
UNKEPT = [
    (State({"layer.weight": SPARSE}, {}), [], None, "the model cannot be kept in a checkpoint: layer.weight is"),
    (State({}, {"w": {"m": SPARSE}}), [], None, "the state of the optimiser cannot be kept in a checkpoint: w/m is"),
    (State({}, {}), [{"lr": SPARSE}], None, "the parameter groups of the optimiser cannot be kept in a checkpoint: "),
    (State({}, {}, {"0": SPARSE}), [], None, "the strategy's state of single ranks cannot be kept in a checkpoint: "),
    (State({}, {}), [], [SPARSE], "the value given as extra cannot be kept in a checkpoint: extra/0 is a sparse"),
    (State({}, {}), [], 10**5000, "a value cannot be kept in a checkpoint: "),
]


@pytest.mark.parametrize(("state", "groups", "extra", "message"), UNKEPT, ids=[message for *_, message in UNKEPT])
def test_a_state_that_cannot_be_kept_is_refused(state: State, groups: Any, extra: Any, message: str) -> None:
    check_keepable(State({}, {}))
    with pytest.raises(CheckpointError) as caught:
        check_keepable(state, groups, extra)
    assert caught.value.message.startswith(message)


def test_settings_that_are_not_json_are_refused(tmp_path: Path) -> None:
    about = info(1)
    about.config["path"] = object()
    with pytest.raises(CheckpointError, match="type object is unsupported"):
        CheckpointFolder(tmp_path).write(State({}, {}), [], about)
    assert list(tmp_path.iterdir()) == []
