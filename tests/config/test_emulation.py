"""Emulated hosts as users write them, and as processes on them are told."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import LaunchConfig
from paceline.config.emulation import (
    EmulatedHostSpec,
    EmulationInfo,
    emulation_info,
    format_hosts,
    parse_hosts,
)
from paceline.errors import UsageError

PLACE = EmulationInfo(spec="4@200mbit", host=2, hosts=4, master="198.18.0.1:29500", host_cpus=0.5)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("1", [EmulatedHostSpec()]),
        ("3", [EmulatedHostSpec()] * 3),
        ("4@200mbit", [EmulatedHostSpec(200e6)] * 4),
        ("2@1.5Gbit", [EmulatedHostSpec(1.5e9)] * 2),
        ("1@100kbit", [EmulatedHostSpec(100e3)]),
        ("2@200mbit+5ms", [EmulatedHostSpec(200e6, 0.005)] * 2),
        ("2+250us", [EmulatedHostSpec(None, 0.00025)] * 2),
        ("1+1s", [EmulatedHostSpec(None, 1.0)]),
        ("2@1gbit,2@100mbit", [EmulatedHostSpec(1e9)] * 2 + [EmulatedHostSpec(100e6)] * 2),
        (" 1 , 1@1gbit+1ms ", [EmulatedHostSpec(), EmulatedHostSpec(1e9, 0.001)]),
    ],
)
def test_parse(text: str, hosts: list[EmulatedHostSpec]) -> None:
    assert [(h.rate_bit_s, h.delay_s) for h in parse_hosts(text)] == [
        (h.rate_bit_s, pytest.approx(h.delay_s)) for h in hosts
    ]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 999)), min_size=1, max_size=6))
def test_every_group_has_its_hosts_at_its_rate(groups: list[tuple[int, int]]) -> None:
    hosts = parse_hosts(",".join(f"{number}@{rate}mbit" for number, rate in groups))
    assert [host.rate_bit_s for host in hosts] == [rate * 1e6 for number, rate in groups for _ in range(number)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("four", "is not a number of hosts"),
        ("-2", "is not a number of hosts"),
        ("4@", "is not a number of hosts"),
        ("4@fast", "is not a number of hosts"),
        ("4,", "is not a number of hosts"),
        ("4@200mbit+", "is not a number of hosts"),
        ("4+5ms@200mbit", "is not a number of hosts"),
        ("4@200mbit;reboot", "is not a number of hosts"),
        ("4@200", "the rate in .* has no unit"),
        ("4@200mbps", "the rate in .* has the unit 'mbps'"),
        ("4@200mbit+5", "the delay in .* has no unit"),
        ("4@1kbit", "a rate in .* is out of range"),
        ("4@200gbit", "a rate in .* is out of range"),
        ("4+11s", "a delay in .* is out of range"),
        ("4+0ms", "a delay in .* is out of range"),
        ("0", "asks for no hosts"),
        ("65", "asks for more than 64 hosts"),
        ("40,40", "asks for more than 64 hosts"),
        (f"{10**30}", "asks for more than 64 hosts"),
    ],
)
def test_parse_refuses(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_hosts(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1", "1 emulated host at full speed"),
        ("4@200mbit", "4 emulated hosts at 200 Mbit/s each way"),
        ("2@0.5mbit+5ms", "2 emulated hosts at 500 kbit/s each way, 5 ms delay"),
        ("2@1gbit,1@100mbit", "3 emulated hosts: 2 at 1 Gbit/s each way; 1 at 100 Mbit/s each way"),
    ],
)
def test_in_words(text: str, words: str) -> None:
    assert format_hosts(parse_hosts(text)) == words


def test_a_place_is_told_by_the_environment() -> None:
    variables = PLACE.variables()
    assert emulation_info(variables) == PLACE
    assert emulation_info({}) is None


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "{",
        "[]",
        '{"spec": "4"}',
        "\udcff",
        json.dumps({**json.loads(PLACE.variables()["PACELINE_EMULATED"]), "host": "2"}),
    ],
)
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="PACELINE_EMULATED was not set by Paceline"):
        emulation_info({"PACELINE_EMULATED": text})


def test_a_launch_as_an_emulated_host_sees_it() -> None:
    launch = LaunchConfig(emulate="4@200mbit", host_cpus=0.5, ranks=8, threads=1)
    here = launch.on_emulated_host(PLACE)
    assert here == LaunchConfig(hosts=4, node_rank=2, master="198.18.0.1:29500", ranks=8, threads=1)
    assert here.local_ranks(default=1) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"emulate": "2@"}, "is not a number of hosts"),
        ({"emulate": "2", "hosts": 2, "master": "a:1"}, "--emulate and --hosts were both given"),
        ({"emulate": "2", "master": "a:1"}, "--emulate and --master were both given"),
        ({"emulate": "2", "iface": "lo"}, "--emulate and --iface were both given"),
        ({"emulate": "3", "ranks": 4}, "4 ranks do not divide over 3 hosts"),
        ({"host_cpus": 0.5}, "--host-cpus 0.5 was given without --emulate"),
        ({"emulate": "2", "host_cpus": 0.0}, "--host-cpus is 0.0"),
        ({"emulate": "2", "host_cpus": float("nan")}, "--host-cpus is nan"),
    ],
)
def test_a_launch_refuses(settings: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LaunchConfig(**settings)  # type: ignore[arg-type]
