"""What is refused before any process starts."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from paceline.config import CompareConfig, LaunchConfig, RunConfig
from paceline.config.emulation import EmulationInfo
from paceline.errors import PacelineError, UsageError
from paceline.experiments.candidates import make_candidates
from paceline.experiments.checks import (
    check_length,
    check_strategy,
    choose_shape,
    config_on_fewer_hosts,
    left_out_of_sets,
    settings_of,
)
from paceline.experiments.names import check_names
from paceline.experiments.training_targets import SCRIPT_RULES
from paceline.launch.launcher_process import LauncherProcess, Shape
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.base.abilities import SlowOnGpus
from paceline.strategies.base.strategy import Role, Strategy
from paceline.strategies.registry import SETS, create


def ranks(run: dict[str, Any], **launch: Any) -> int:
    config = LaunchConfig(**launch)
    launcher = LauncherProcess(
        number=config.node_rank, launchers=config.hosts, node=config.node_rank, master=config.master
    )
    return choose_shape(RunConfig(device="cpu", **run), config, launcher).ranks_per_host


def test_the_fewest_hosts_are_not_more_than_there_are() -> None:
    several = {"hosts": 2, "master": "198.18.0.1:1", "ranks_per_host": 1, "max_restarts": 1}
    assert ranks({}, **several, min_hosts=2) == 1
    with pytest.raises(UsageError, match=r"--min-hosts is 3, but the launch has 2 hosts\."):
        ranks({}, **several, min_hosts=3)


def test_the_global_batch_stays_on_fewer_hosts() -> None:
    first, fewer = Shape(3, 2), Shape(2, 2)
    on_fewer = config_on_fewer_hosts(RunConfig(batch_per_rank=8), first, fewer)
    assert (on_fewer.batch, on_fewer.batch_per_rank) == (48, None)
    servers = RunConfig(batch_per_rank=8, strategy="parameter_server:servers=2,extra=true")
    assert config_on_fewer_hosts(servers, first, fewer).batch == 32
    with pytest.raises(UsageError, match="slow-rank"):
        config_on_fewer_hosts(RunConfig(batch=48, slow_rank="5:2"), first, fewer)


def test_ranks_by_default() -> None:
    assert ranks({}) == 2
    assert ranks({"strategy": "single"}) == 1


def test_emulated_hosts_have_one_rank_each_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EmulationInfo(spec="3@500mbit", host=0, hosts=3, master="198.18.0.1:1").variables().items():
        monkeypatch.setenv(name, value)
    there = {"hosts": 3, "master": "198.18.0.1:1"}
    assert ranks({}, **there) == 1
    assert ranks({}, ranks=6, **there) == 2
    assert ranks({}, ranks_per_host=3, **there) == 3


def test_ranks_as_asked_for() -> None:
    assert ranks({}, ranks=4) == 4
    assert ranks({}, ranks=4, hosts=2, master="127.0.0.1:1") == 2
    assert ranks({}, ranks_per_host=3, hosts=2, master="127.0.0.1:1") == 3


def test_a_batch_is_shared_by_workers_only() -> None:
    assert ranks({"strategy": "single", "batch": 2}, ranks=4) == 4
    with pytest.raises(UsageError, match="a global batch of 3 leaves some of the 4 ranks without a sample"):
        ranks({"strategy": "ddp", "batch": 3}, ranks=4)


def test_tensorboard_has_to_be_there_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks({"tensorboard": True}) == 2
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PacelineError, match="needs the package tensorboard, which is not installed") as caught:
        ranks({"tensorboard": True})
    assert "pip install 'paceline[tensorboard]'" in (caught.value.hint or "")


def test_nccl_needs_a_gpu_for_each_rank() -> None:
    with pytest.raises(UsageError, match="nccl needs one GPU per rank, but this host has 0 for 2 ranks"):
        ranks({"backend": "nccl"})


class Rigid(AllReduce):
    """Can neither clip nor accumulate."""

    supports = frozenset[str]()


@pytest.mark.parametrize(("setting", "option"), [("clip_norm", "--clip-norm"), ("accumulate", "--accumulate")])
def test_what_a_strategy_does_not_support(setting: str, option: str) -> None:
    with pytest.raises(UsageError, match=f"allreduce does not support {option}"):
        check_strategy(RunConfig(**{setting: 2}), Rigid(), ranks=2)
    check_strategy(RunConfig(**{setting: 2}), AllReduce(), ranks=2)


class Unscaled(AllReduce):
    """Has the older signature of `step`."""

    def step(self, max_norm: float | None = None) -> None:  # type: ignore[override]
        super().step(max_norm)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (Rigid(), "allreduce does not support a GradScaler"),
        (Unscaled(), "its method `step` has no `scaler`"),
        (create("parameter_server:asynchronous=true"), "a GradScaler in asynchronous mode"),
    ],
)
def test_float16_needs_a_strategy_that_unscales(strategy: Strategy, reason: str) -> None:
    with pytest.raises(UsageError, match=f"--precision fp16 scales the loss, but .*{reason}") as caught:
        check_strategy(RunConfig(precision="fp16"), strategy, ranks=2)
    assert "--precision bf16" in (caught.value.hint or "")
    check_strategy(RunConfig(precision="bf16"), strategy, ranks=2)
    check_strategy(RunConfig(precision="fp16"), AllReduce(), ranks=2)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (Rigid(), "allreduce does not support a GradScaler"),
        (create("parameter_server:asynchronous=true"), "a GradScaler in asynchronous mode"),
    ],
)
def test_skipping_steps_needs_a_strategy_that_agrees_on_it(strategy: Strategy, reason: str) -> None:
    with pytest.raises(UsageError, match=f"--on-nan skip checks gradients as a GradScaler does, but .*{reason}"):
        check_strategy(RunConfig(on_nan="skip"), strategy, ranks=2)
    check_strategy(RunConfig(on_nan="stop"), strategy, ranks=2)
    check_strategy(RunConfig(on_nan="skip"), AllReduce(), ranks=2)


class Impatient(AllReduce):
    """Ranks do not wait for each other, but nothing says what each trains next."""

    lockstep = False


class Serverless(AllReduce):
    """The last rank is a server that cannot serve."""

    def roles(self, world_size: int) -> list[Role]:
        return [Role.WORKER] * (world_size - 1) + [Role.SERVER]


@pytest.mark.parametrize(("strategy", "method"), [(Impatient, "next_ticket"), (Serverless, "serve")])
def test_a_strategy_without_a_method_that_it_needs(strategy: type[AllReduce], method: str) -> None:
    with pytest.raises(UsageError, match=f"no method `{method}`"):
        check_strategy(RunConfig(), strategy(), ranks=2)


def test_a_rank_that_only_serves_cannot_be_slowed() -> None:
    slowed, serving = RunConfig(slow_rank="2:3"), create("parameter_server:extra=true")
    check_strategy(slowed, serving, ranks=4)
    check_strategy(slowed, serving, ranks=2)  # As in `scale`: where there are fewer, all are as fast.
    check_strategy(slowed, create("single"), ranks=3)
    with pytest.raises(UsageError, match="rank 2, which does not train under parameter_server") as caught:
        check_strategy(slowed, serving, ranks=3)
    assert caught.value.hint == "ranks that train: 0, 1"


def test_a_script_has_no_tickets() -> None:
    SCRIPT_RULES.check_fit(RunConfig(), create("parameter_server"), ranks=2)
    with pytest.raises(UsageError, match="a script divides its data itself"):
        SCRIPT_RULES.check_fit(RunConfig(), create("parameter_server:asynchronous=true"), ranks=2)


@pytest.mark.parametrize("name", ["./gpt.py:make", "folder/gpt:make", "gpt.py:make"])
def test_a_path_is_not_a_module(name: str) -> None:
    with pytest.raises(UsageError, match="is not a module name") as caught:
        check_names(RunConfig(workload=name))
    assert "gpt:NAME" in (caught.value.hint or "")


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="there is no module 'nowhere_to_be_found'"):
        check_names(RunConfig(workload="nowhere_to_be_found:make"))
    with pytest.raises(UsageError, match="there is no module 'nowhere_to_be_found'"):
        check_names(RunConfig(strategy="nowhere_to_be_found:Mine"))


def test_hosts_agree_on_settings_except_those_of_a_host() -> None:
    own = LaunchConfig(hosts=2, node_rank=1, master="198.18.0.1:1", iface="eth1", threads=3)
    settings = settings_of("compare", own, RunConfig(data_dir="/data"), CompareConfig(vary=("lr=0.1,0.2",)))
    other = LaunchConfig(hosts=2, node_rank=0, master="127.0.0.1:1")
    assert settings == settings_of("compare", other, RunConfig(), CompareConfig(vary=("lr=0.1,0.2",)))
    assert (settings["hosts"], settings["workload"], settings["vary"]) == (2, "cnn", ["lr=0.1,0.2"])
    assert not settings.keys() & {"node_rank", "master", "iface", "threads", "data_dir"}


def test_a_run_needs_more_than_its_warm_up_steps() -> None:
    check_length([None, 6], default=20)
    with pytest.raises(UsageError, match="--steps 5 leaves no step to measure") as caught:
        check_length([40, 5], default=20)
    assert caught.value.hint == "use --steps 20, or leave it out"


def test_sets_leave_out_on_gpus_what_does_not_pay_there() -> None:
    members = [name for name in SETS["all"] if isinstance(create(name), SlowOnGpus)]
    assert members, "a strategy that sums in main memory"
    assert [sentence.split()[0] for sentence in left_out_of_sets("all", gpus=1)] == members
    assert [sentence.split()[0] for sentence in left_out_of_sets("usual,fast", gpus=2)] == [
        name for name in dict.fromkeys([*SETS["usual"], *SETS["fast"]]) if name in members
    ]
    assert left_out_of_sets("all", gpus=0) == []
    assert left_out_of_sets(",".join(["all", *members]), gpus=1) == [], "a strategy that is named is measured"
    (sentence, *_) = left_out_of_sets("usual", gpus=1)
    assert sentence.endswith(". Name it in --strategies to measure it anyway.")


@pytest.mark.gpu
def test_the_default_set_on_a_gpu() -> None:
    shape = Shape(1, 2)
    usual = [one.config.strategy for one in make_candidates(RunConfig(), CompareConfig(), shape)]
    assert usual == [name for name in SETS["usual"] if not isinstance(create(name), SlowOnGpus)]
    on_cpus = [one.config.strategy for one in make_candidates(RunConfig(device="cpu"), CompareConfig(), shape)]
    assert on_cpus == list(SETS["usual"])
