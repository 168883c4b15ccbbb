"""`OptimizerSettings`: numbers of an optimiser's settings, read on one rank and written on another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import WorkloadError
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"nesterov": True}, "nesterov has changed from False to True"),
        ({"lr": None}, "lr has changed from 0.05 to None"),
    ],
)
def test_a_changed_setting_that_is_not_a_number_is_refused(change: dict[str, Any], found: str) -> None:
    optimizer = torch.optim.SGD([("w", nn.Parameter(torch.zeros(1)))], lr=0.05, momentum=0.9)
    settings = OptimizerSettings(optimizer)
    optimizer.param_groups[0]["initial_lr"] = "added by a scheduler"
    settings.read()
    optimizer.param_groups[0].update(change)
    with pytest.raises(WorkloadError, match=found):
        settings.read()


def test_settings_keep_their_type() -> None:
    named = [("w", nn.Parameter(torch.zeros(1)))]
    worker = torch.optim.SGD(named, lr=torch.tensor(0.5), momentum=0)
    server = torch.optim.SGD(named, lr=torch.tensor(0.5), momentum=0)
    worker.param_groups[0].update(lr=torch.tensor(0.25), momentum=0.5)
    OptimizerSettings(server).write(OptimizerSettings(worker).read(), updates_per_step=2)
    assert torch.equal(server.param_groups[0]["lr"], torch.tensor(0.125))
    assert server.param_groups[0]["momentum"] == 0.5
    assert server.param_groups[0]["weight_decay"] == 0
    assert isinstance(server.param_groups[0]["weight_decay"], int)


def test_settings_follow_a_loaded_state() -> None:
    """`load_state_dict` replaces the parameter groups; a scheduler then changes the new ones."""
    optimizer = torch.optim.SGD([("w", nn.Parameter(torch.zeros(1)))], lr=0.05)
    settings = OptimizerSettings(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25
    assert 0.25 in settings.read()


def test_equal_settings_have_equal_checksums() -> None:
    def checksum(**settings: Any) -> int:
        return OptimizerSettings(torch.optim.Adam([nn.Parameter(torch.zeros(1))], **settings)).checksum()

    assert checksum(lr=1, betas=(0.5, 0.9)) == checksum(lr=1.0, betas=(0.5, 0.9)) == checksum(lr=1, betas=[0.5, 0.9])
    others = [{"lr": 1.5}, {"lr": 1, "amsgrad": True}, {"lr": 1, "betas": (0.9, 0.5)}, {"lr": torch.tensor(0.1)}]
    assert len({checksum(**settings) for settings in others} | {checksum(lr=1)}) == 5
