"""Requests: a command line is parsed into one without running anything, and carried out where it asks for."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from paceline.cli.compare import CompareRequest
from paceline.cli.doctor import DoctorRequest
from paceline.cli.main import execute, parse
from paceline.cli.report import ReportRequest
from paceline.cli.requests import LaunchRequest, Request, RequestedRanks
from paceline.cli.scale import ScaleRequest
from paceline.cli.strategies import StrategiesRequest
from paceline.cli.submit import SubmitRequest
from paceline.cli.train import TrainRequest
from paceline.config import CompareConfig, LaunchConfig, RunConfig, ScaleConfig
from paceline.config.emulation import EmulationInfo
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("line", "request_"),
    [
        ("train", TrainRequest(run=RunConfig(), launch=LaunchConfig())),
        (
            "train vgg11 --batch 64 --no-reshuffle --ranks 3 --out there --json",
            TrainRequest(
                run=RunConfig(workload="vgg11", batch=64, reshuffle=False),
                launch=LaunchConfig(ranks=3),
                out=Path("there"),
                as_json=True,
            ),
        ),
        (
            "compare --strategies ddp,p2p --vary lr=1,2 --vary batch=8,16 --script mine.py -- --batch 7 -- x",
            CompareRequest(
                compare=CompareConfig(strategies="ddp,p2p", vary=("lr=1,2", "batch=8,16"), script="mine.py"),
                run=RunConfig(),
                launch=LaunchConfig(),
                script_arguments=("--batch", "7", "--", "x"),
            ),
        ),
        (
            "scale --ranks 1,2 --mode weak --steps 8 --emulate 2",
            ScaleRequest(
                scale=ScaleConfig(ranks="1,2", mode="weak"), run=RunConfig(steps=8), launch=LaunchConfig(emulate="2")
            ),
        ),
        ("doctor --ranks 2 --lr 0.5", DoctorRequest(run=RunConfig(lr=0.5), launch=LaunchConfig(ranks=2))),
        (
            "report a b --csv tables --trace",
            ReportRequest(folders=(Path("a"), Path("b")), csv=Path("tables"), trace=True),
        ),
        ("strategies ddp --json", StrategiesRequest(name="ddp", as_json=True)),
        (
            "submit -N2 --gres gpu:4 --qos=high --mem 3G --dry-run -- paceline train --ranks 4",
            SubmitRequest(
                hosts=2,
                gres="gpu:4",
                other_options=(("--qos=high",), ("--mem", "3G")),
                dry_run=True,
                submitted=TrainRequest(run=RunConfig(), launch=LaunchConfig(ranks=4)),
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_line_becomes_a_request(line: str, request_: Request) -> None:
    found = parse(line.split())
    assert found == request_
    assert found is not None
    assert found.arguments == tuple(line.split())
    with pytest.raises(FrozenInstanceError):
        found.arguments = ()  # type: ignore[misc]


def test_a_submitted_command_has_its_own_arguments() -> None:
    found = parse(["submit", "--hosts", "2", "--", "paceline", "compare", "--script", "a b.py", "--", "c d"])
    assert isinstance(found, SubmitRequest)
    assert found.submitted.arguments == ("compare", "--script", "a b.py", "--", "c d")


@pytest.mark.parametrize(
    "line", ["", "--help", "--version", "train --help", "submit --help", "submit -- train --help", "submit -- --help"]
)
def test_help_and_version_are_printed_and_make_no_request(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(line.split()) is None
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("train --bacth 3", "No such option: --bacth"),
        ("trian", "No such command 'trian'"),
        ("report", "Missing argument"),
        ("train --lr -1", "--lr is -1.0"),
        ("submit -- train --bacth 3", "No such option: --bacth"),
        ("submit -- report", "`paceline report` starts no ranks"),
        ("submit", "no command to submit was given"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(line: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        parse(line.split())


def test_emulated_hosts_carry_out_a_request_that_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process creates the hosts; the processes on the hosts carry the request out, each as one host."""
    emulated: list[LaunchRequest] = []
    carried_out: list[TrainRequest] = []
    monkeypatch.setattr(
        sys.modules["paceline.cli.main"], "run_on_emulated_hosts", lambda one: emulated.append(one) or 7
    )
    monkeypatch.setattr(TrainRequest, "carry_out", lambda one: carried_out.append(one) or 8)
    request = TrainRequest(run=RunConfig(), launch=LaunchConfig(emulate="2", host_cpus=0.5))
    assert execute(request) == 7
    assert (emulated, carried_out) == ([request], [])

    host = EmulationInfo(spec="2", host=1, hosts=2, master="198.18.0.1:29500", host_cpus=0.5)
    for name, value in host.variables().items():
        monkeypatch.setenv(name, value)
    assert execute(request) == 8
    on_host = LaunchConfig(hosts=2, node_rank=1, master="198.18.0.1:29500")
    assert (len(emulated), carried_out) == (1, [TrainRequest(run=RunConfig(), launch=on_host)])


def test_a_request_without_emulation_is_carried_out_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainRequest, "carry_out", lambda _: 8)
    assert execute(TrainRequest(run=RunConfig(), launch=LaunchConfig())) == 8


def test_ranks_that_a_command_line_sets() -> None:
    train = TrainRequest(run=RunConfig(), launch=LaunchConfig(ranks=4))
    assert train.requested_ranks() == RequestedRanks(4, 0, exact=True)
    scale = ScaleRequest(scale=ScaleConfig(ranks="1,4,2"), run=RunConfig(), launch=LaunchConfig())
    assert scale.requested_ranks() == RequestedRanks(4, 0, exact=False)
