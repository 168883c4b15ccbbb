"""Parsers of short texts: options of the command line, and variables of the environment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fuzzing.mutations import change_json, change_text
from fuzzing.parser import Parser, Prepared
from paceline.cli.main import parse as parse_command_line
from paceline.config import LaunchConfig, RunConfig
from paceline.config.checkpoint_interval import CheckpointInterval
from paceline.config.compare import CompareConfig
from paceline.config.emulation import EMULATION_VARIABLE, EmulationInfo, emulation_info, parse_hosts
from paceline.config.points import parse_counts
from paceline.config.run import step_range
from paceline.config.slow_ranks import parse_slow_ranks
from paceline.config.specs import Spec, split_list
from paceline.errors import LaunchError
from paceline.experiments.candidates import make_candidates
from paceline.launch.launcher_process import Shape
from paceline.launch.rank_assignment import find_launcher_process
from paceline.launch.rendezvous import format_endpoint, parse_master
from paceline.launch.slurm.step import SlurmStep
from paceline.strategies.registry import create, parse_list
from paceline.workloads import data

EMULATED = EmulationInfo(spec="4@200mbit", host=1, hosts=4, master="198.18.0.1:29500", host_cpus=0.5)
TORCHRUN = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0"
SLURM = (
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=5 SLURM_NTASKS=5 SLURM_NODEID=1 SLURM_LOCALID=0 "
    "SLURM_STEP_NODELIST=n[1-2,07],gpu-a SLURM_STEP_TASKS_PER_NODE=1(x3),2"
)
COMMANDS = (
    "compare cnn --strategies ddp,ring --vary bucket=1,2 --ranks 2 --batch 32",
    "train vgg11 --data synthetic:size=500 --epochs 2 --strategy ddp:bucket_mb=1 --lr 0.1",
    "scale cnn --ranks 1,2,4 --mode strong,weak",
    "batch cnn --sizes 32,64 --repeats 2 --emulate 4@200mbit",
)


def _texts(parse: Callable[[str], object], *seeds: str) -> Callable[[Path], Prepared]:
    return lambda _: Prepared(seeds, parse)


def _spec(text: str) -> None:
    spec = Spec.parse(text)
    assert Spec.parse(str(spec)) == spec, "a spec is read as it is written"


def _specs(text: str) -> None:
    items = split_list(text)
    assert split_list(",".join(items)) == items, "a list of specs is read as it is written"


def _strategies(text: str) -> None:
    for strategy in parse_list(text)[:20]:
        create(strategy)


def _hosts(text: str) -> None:
    hosts = parse_hosts(text)
    parts = [
        "1"
        + ("" if host.rate_bit_s is None else f"@{host.rate_bit_s / 1e3:.6f}kbit")
        + ("" if host.delay_s is None else f"+{host.delay_s * 1e6:.6f}us")
        for host in hosts
    ]
    again = parse_hosts(",".join(parts))
    assert [host.rate_bit_s is None for host in again] == [host.rate_bit_s is None for host in hosts]
    assert [host.delay_s is None for host in again] == [host.delay_s is None for host in hosts]


def _slow_ranks(text: str) -> None:
    slowed = parse_slow_ranks(text)
    assert parse_slow_ranks(",".join(f"{rank}:{factor!r}" for rank, factor in slowed.items())) == slowed


def _counts(text: str) -> None:
    counts = parse_counts(text, "--sizes")
    assert parse_counts(",".join(map(str, counts)), "--sizes") == counts


def _interval(text: str) -> None:
    found = CheckpointInterval.parse(text, "--checkpoint-every")
    assert len([value for value in dataclasses.astuple(found) if value]) == 1


def _vary(text: str) -> None:
    if text.count(",") < 30:  # Each value is a candidate.
        make_candidates(RunConfig(), CompareConfig(vary=(text,)), Shape(hosts=1, ranks_per_host=2))


def _master(text: str) -> None:
    address = parse_master(text)
    assert parse_master(format_endpoint(*address)) == address


def _environment(text: str) -> dict[str, str]:
    return dict(item.partition("=")[::2] for item in text.split(" "))


def _torchrun(text: str) -> None:
    find_launcher_process(LaunchConfig(), {"RANK": "0", "WORLD_SIZE": "1"} | _environment(text))


def _emulated(content: bytes) -> None:
    found = emulation_info({EMULATION_VARIABLE: content.decode(errors="surrogateescape")})
    assert found is None or emulation_info(found.variables()) == found


def _prepare_emulated(_: Path) -> Prepared:
    return Prepared([json.dumps(dataclasses.asdict(EMULATED)).encode()], _emulated)


def _words(text: str) -> None:
    """Parse a command line without its help, which is printed, and without files that a path in it may name."""
    words = [word for word in text.split(" ") if word not in ("--help", "--version")]
    parse_command_line(words or ["train"])


PARSERS: Sequence[Parser] = (
    Parser("spec", _texts(_spec, "ddp", "ddp:bucket_mb=1,x=2", "module:Class:a=1"), change_text, weight=50),
    Parser("list of specs", _texts(_specs, "ddp,ring", "a,b:x=1,y=2,c", "m:C:a=1,b"), change_text, weight=40),
    Parser(
        "strategies",
        _texts(_strategies, "ddp:bucket_mb=1", "usual", "ring,parameter_server:servers=1", "priority"),
        change_text,
        weight=50,
    ),
    Parser(
        "data set",
        _texts(data.check, "cifar10", "svhn:extra=true", "synthetic:size=500,shape=3x8x8,noise=0.5", "digits"),
        change_text,
        weight=50,
    ),
    Parser(
        "--emulate",
        _texts(_hosts, "4", "4@200mbit", "4@0.5gbit+5ms", "2@1gbit,2@100mbit"),
        change_text,
        "--emulate",
        weight=50,
    ),
    Parser(
        "--slow-rank", _texts(_slow_ranks, "1:3", "1:3,2:1.5", "none", "1:3+2:2"), change_text, "--slow-rank", weight=30
    ),
    Parser("--sizes", _texts(_counts, "1,2,4", "32", "64, 8"), change_text, "--sizes", weight=25),
    Parser(
        "--checkpoint-every",
        _texts(_interval, "100", "30s", "1.5h", "epoch"),
        change_text,
        "--checkpoint-every",
        weight=25,
    ),
    Parser(
        "--profile",
        _texts(lambda text: step_range(text, "--profile"), "20", "20-22"),
        change_text,
        "--profile",
        weight=20,
    ),
    Parser(
        "--vary",
        _texts(_vary, "lr=0.1,0.2", "batch=32", "data=synthetic:size=50,digits", "slow_rank=,1:3"),
        change_text,
        weight=5,
        slow=True,
    ),
    Parser("--master", _texts(_master, "198.18.0.1:29500", "[::1]:80", "host:1"), change_text, "--master", weight=25),
    Parser("torchrun", _texts(_torchrun, TORCHRUN), change_text, weight=10),
    Parser(
        "Slurm",
        _texts(lambda text: SlurmStep.read(_environment(text)), SLURM),
        change_text,
        "S",
        LaunchError,
        weight=10,
    ),
    Parser("PACELINE_EMULATED", _prepare_emulated, change_json, EMULATION_VARIABLE, weight=10),
    Parser("command line", _texts(_words, *COMMANDS), change_text, weight=2, slow=True),
)
