"""Which names are refused, and which data are fetched, before anything is started."""

from __future__ import annotations

import pytest

from paceline.config import CompareConfig, LaunchConfig, RunConfig
from paceline.errors import UsageError
from paceline.experiments.names import check_all_names, prepare_all_data
from paceline.workloads import data


@pytest.mark.parametrize(
    ("configs", "sets"),
    [
        ((RunConfig(data="svhn"), LaunchConfig()), ["svhn"]),
        ((CompareConfig(vary=("lr=0.1,0.2",)), RunConfig(data="svhn")), ["svhn"]),
        ((CompareConfig(vary=("lr=0.1,0.2", "data=digits,cifar10")), RunConfig(data="svhn")), ["digits", "cifar10"]),
        ((CompareConfig(vary=("data=svhn,svhn:extra=true",)), RunConfig()), ["svhn", "svhn:extra=true"]),
        ((CompareConfig(vary=("--data=svhn",)), RunConfig()), ["svhn"]),
        ((CompareConfig(script="own.py"), RunConfig(data="svhn")), []),
        ((RunConfig(workload="user_workloads:plain", data="svhn"),), []),
        ((LaunchConfig(),), []),
    ],
)
def test_the_data_of_a_command(monkeypatch: pytest.MonkeyPatch, configs: tuple[object, ...], sets: list[str]) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(data, "prepare", lambda name, **_: fetched.append(name))
    prepare_all_data(configs)
    assert fetched == sets


def test_every_strategy_of_a_command_is_looked_up() -> None:
    check_all_names([CompareConfig(strategies="ddp,p2p"), RunConfig()])
    with pytest.raises(UsageError, match="there is no strategy 'dpd'"):
        check_all_names([CompareConfig(strategies="p2p,dpd"), RunConfig()])
