"""Commands for `ip` and `tc`, checked as text, since not every kernel supports all of them."""

from __future__ import annotations

import re

import pytest

from paceline.config.emulation import EmulatedHostSpec
from paceline.errors import LaunchError
from paceline.launch.emulation import network
from paceline.launch.emulation.network import address_of, burst_bytes, delay_commands, rate_commands, segment_commands


def test_addresses_continue_beyond_255() -> None:
    assert [address_of(host) for host in (0, 3, 254, 255)] == ["198.18.0.1", "198.18.0.4", "198.18.0.255", "198.18.1.0"]


@pytest.mark.parametrize("rate", [100e3, 50e6, 200e6, 1e9, 100e9])
def test_a_burst_is_a_millisecond_and_holds_a_segment(rate: float) -> None:
    (command,) = rate_commands("eth0", rate)
    found = re.fullmatch(r"qdisc add dev eth0 root handle 1: tbf rate (\d+)bit burst (\d+) limit (\d+)", command)
    assert found is not None
    rate_in_command, burst, limit = map(int, found.groups())
    assert rate_in_command == rate
    assert burst == burst_bytes(rate) == max(4 * 1514, rate / 8 / 1000)
    assert limit - burst == max(65536, rate / 8 / 50)
    (command,) = segment_commands("eth0", rate)
    assert 2 * 1514 <= int(command.rpartition(" ")[2]) <= min(burst / 2, 65536)


def test_full_speed_needs_no_commands() -> None:
    assert (
        rate_commands("eth0", None)
        == segment_commands("eth0", None)
        == delay_commands("eth0", EmulatedHostSpec())
        == []
    )


def test_a_delay_is_a_child_of_the_rate_limit_and_holds_packets_in_flight() -> None:
    assert delay_commands("eth0", EmulatedHostSpec(None, 0.0025)) == [
        "qdisc add dev eth0 root handle 2: netem delay 2500us limit 1000"
    ]
    # 1 Gbit/s for 10 ms are 1.25 MB: 826 packets of 1514 bytes.
    assert delay_commands("eth0", EmulatedHostSpec(1e9, 0.01)) == [
        "qdisc add dev eth0 parent 1:1 handle 2: netem delay 10000us limit 1826"
    ]


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(network, "_SYSTEM_PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="need the program 'ip'") as caught:
        network.connect(None, [], [])  # type: ignore[arg-type]
    assert "apt install iproute2" in (caught.value.hint or "")
