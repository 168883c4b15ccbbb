"""Links between emulated hosts: a bridge, a pair of virtual interfaces per host, and `tc` at both ends of each link.

Functions return the commands for `ip` and `tc`; `connect` runs them in the namespaces.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Sequence

from paceline.config.emulation import EmulatedHostSpec
from paceline.errors import LaunchError
from paceline.launch.emulation.namespaces import Namespace, permission_error

INTERFACE = "eth0"
BRIDGE = "switch"
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Folders that may contain `ip` and `tc`; the PATH of ordinary users has no sbin."""

_BURST_S = 0.001
"""Burst size, as seconds at the rate. After a pause, one burst passes at full speed, so it must be short.

Shorter bursts lose throughput to late timers: on 2 busy cores, iperf3 reached 88, 95, 96 and 99% of 1 Gbit/s with 0.1,
0.25, 0.5 and 1 ms, and at least 99.5% of 50 and 200 Mbit/s with each of them."""
_MIN_BURST_BYTES = 4 * 1514
_QUEUE_S = 0.02
"""Queue length, as seconds at the rate: that of a switch with shallow buffers."""
_MIN_QUEUE_BYTES = 65536
_MAX_SEGMENT_BYTES = 65536
_NETEM_PACKETS = 1000


def address_of(host: int) -> str:
    """Return the address of an emulated host, from the range that is reserved for network benchmarks (RFC 2544)."""
    return f"198.18.{(host + 1) >> 8}.{(host + 1) & 255}"


def switch_commands(namespaces: Sequence[Namespace]) -> list[str]:
    """Return commands for `ip -batch` in the switch: a bridge, and per host a port whose peer is in the host."""
    commands = [f"link add {BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0", f"link set {BRIDGE} up"]
    for host, namespace in enumerate(namespaces):
        port = port_of(host)
        commands += [
            f"link add {port} type veth peer name {INTERFACE} netns /proc/self/fd/{namespace.net}",
            f"link set {port} master {BRIDGE} up",
        ]
    return commands


def port_of(host: int) -> str:
    """Return the name of the interface at the switch's end of a host's link."""
    return f"port{host}"


def host_commands(host: int) -> list[str]:
    """Return commands for `ip -batch` on a host that set its address."""
    return ["link set lo up", f"address add {address_of(host)}/15 dev {INTERFACE}", f"link set {INTERFACE} up"]


def rate_commands(interface: str, rate_bit_s: float | None) -> list[str]:
    """Return commands for `tc -batch` that limit the sending rate of an interface; none for None.

    The rate includes Ethernet headers: 1448 bytes of payload count as 1514.
    """
    if rate_bit_s is None:
        return []
    burst = burst_bytes(rate_bit_s)
    limit = max(_MIN_QUEUE_BYTES, math.ceil(rate_bit_s / 8 * _QUEUE_S)) + burst
    return [f"qdisc add dev {interface} root handle 1: tbf rate {round(rate_bit_s)}bit burst {burst} limit {limit}"]


def burst_bytes(rate_bit_s: float) -> int:
    """Return the burst size of a link with the given rate."""
    return max(_MIN_BURST_BYTES, math.ceil(rate_bit_s / 8 * _BURST_S))


def segment_commands(interface: str, rate_bit_s: float | None) -> list[str]:
    """Return commands for `ip -batch` that limit TCP segments to half the burst size; larger ones would be split."""
    if rate_bit_s is None:
        return []
    return [f"link set {interface} gso_max_size {min(burst_bytes(rate_bit_s) // 2, _MAX_SEGMENT_BYTES)}"]


def delay_commands(interface: str, host: EmulatedHostSpec) -> list[str]:
    """Return commands for `tc -batch` that delay sent packets; the delay is a child of the rate limit, if any."""
    if host.delay_s is None:
        return []
    parent = "root handle 2:" if host.rate_bit_s is None else "parent 1:1 handle 2:"
    # The queue must hold all packets in flight: at least the rate times the delay.
    in_flight = 0 if host.rate_bit_s is None else math.ceil(host.rate_bit_s / 8 * host.delay_s / 1514)
    delay_us = round(host.delay_s * 1e6)
    return [f"qdisc add dev {interface} {parent} netem delay {delay_us}us limit {_NETEM_PACKETS + in_flight}"]


def connect(switch: Namespace, namespaces: Sequence[Namespace], hosts: Sequence[EmulatedHostSpec]) -> None:
    """Connect all hosts to the switch, each with its rate and delay. Raise `LaunchError` if that is not possible."""
    ip, tc = _find_tool("ip"), _find_tool("tc")
    ports = [(port_of(number), host.rate_bit_s) for number, host in enumerate(hosts)]
    segments = [command for port in ports for command in segment_commands(*port)]
    _run_batch(
        switch, ip, [*switch_commands(namespaces), *segments], pass_fds=[namespace.net for namespace in namespaces]
    )
    _run_batch(switch, tc, [command for port in ports for command in rate_commands(*port)])
    for number, (namespace, host) in enumerate(zip(namespaces, hosts, strict=True)):
        _run_batch(namespace, ip, [*host_commands(number), *segment_commands(INTERFACE, host.rate_bit_s)])
        _run_batch(namespace, tc, rate_commands(INTERFACE, host.rate_bit_s))
        found = _try_batch(namespace, tc, delay_commands(INTERFACE, host))
        if found is not None:
            raise LaunchError(
                f"this kernel cannot delay packets, since netem is missing: tc printed {found!r}.",
                hint="load netem with `modprobe sch_netem`, or remove the delay from --emulate",
            )


def _find_tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=_SYSTEM_PATH)
    if found is None:
        raise LaunchError(
            f"emulated hosts need the program {name!r}, which is not installed.",
            hint="install iproute2: apt install iproute2",
        )
    return found


def _run_batch(namespace: Namespace, tool: str, commands: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
    found = _try_batch(namespace, tool, commands, pass_fds)
    if found is not None:
        if os.strerror(errno.EPERM) in found:
            raise permission_error()
        raise LaunchError(
            f"the network of the emulated hosts could not be created: {tool} printed {found!r}.",
            hint="load the kernel modules that this needs: `modprobe -a veth bridge sch_tbf`",
        )


def _try_batch(namespace: Namespace, tool: str, commands: Sequence[str], pass_fds: Sequence[int] = ()) -> str | None:
    """Run commands with `ip` or `tc`; return the error output, or None if all succeeded."""
    if not commands:
        return None
    done = namespace.run(tool, "-batch", "-", input="\n".join(commands) + "\n", pass_fds=pass_fds)
    if done.returncode == 0:
        return None
    return (done.stderr or done.stdout).strip().replace("\n", "; ") or f"exit code {done.returncode}"
