"""The lines between emulated hosts: a bridge, a pair of interfaces per host, and `tc` at both ends of each.

What `ip` and `tc` are told is data, made here and run in the namespaces by `connect`.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Sequence

from paceline.config.emulation import EmulatedHostSpec
from paceline.errors import LaunchError
from paceline.launch.emulation.namespaces import Namespace, not_allowed

INTERFACE = "eth0"
BRIDGE = "switch"
_TOOLS_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where `ip` and `tc` are: a plain user's PATH has no sbin."""

_BURST_S = 0.001
"""What may pass at once, in seconds of the rate. After a pause that much is not slowed down, so it has to be short, but
late timers cost rate when it is shorter: on 2 busy cores iperf3 had 88, 95, 96 and 99% of 1 Gbit/s with 0.1, 0.25, 0.5
and 1 ms, and 99.5% or more of 50 and 200 Mbit/s with any."""
_LEAST_BURST_BYTES = 4 * 1514
_QUEUE_S = 0.02
"""What may wait for its turn, in seconds of the rate: that of a switch with shallow buffers."""
_LEAST_QUEUE_BYTES = 65536
_LARGEST_PIECE_BYTES = 65536
_NETEM_PACKETS = 1000


def address_of(host: int) -> str:
    """The address of an emulated host, from the range that was set aside for tests of networks (RFC 2544)."""
    return f"198.18.{(host + 1) >> 8}.{(host + 1) & 255}"


def switch_commands(namespaces: Sequence[Namespace]) -> list[str]:
    """For `ip -batch` in the switch: the bridge, and a port for each host, whose other end goes to the host."""
    commands = [f"link add {BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0", f"link set {BRIDGE} up"]
    for host, namespace in enumerate(namespaces):
        port = port_of(host)
        commands += [
            f"link add {port} type veth peer name {INTERFACE} netns /proc/self/fd/{namespace.net}",
            f"link set {port} master {BRIDGE} up",
        ]
    return commands


def port_of(host: int) -> str:
    """The switch's end of a host's line."""
    return f"port{host}"


def host_commands(host: int) -> list[str]:
    """For `ip -batch` on a host: its address."""
    return ["link set lo up", f"address add {address_of(host)}/15 dev {INTERFACE}", f"link set {INTERFACE} up"]


def rate_commands(interface: str, rate_bit_s: float | None) -> list[str]:
    """For `tc -batch`: holds what an interface sends to a rate.

    Packets are counted with their Ethernet header: 1448 bytes of payload take 1514.
    """
    if rate_bit_s is None:
        return []
    burst = burst_bytes(rate_bit_s)
    limit = max(_LEAST_QUEUE_BYTES, math.ceil(rate_bit_s / 8 * _QUEUE_S)) + burst
    return [f"qdisc add dev {interface} root handle 1: tbf rate {rate_bit_s:.0f}bit burst {burst} limit {limit}"]


def burst_bytes(rate_bit_s: float) -> int:
    """What a line at this rate lets pass at once."""
    return max(_LEAST_BURST_BYTES, math.ceil(rate_bit_s / 8 * _BURST_S))


def piece_commands(interface: str, rate_bit_s: float | None) -> list[str]:
    """For `ip -batch`: has TCP hand over data in pieces that fit into a burst; larger ones would be cut up."""
    if rate_bit_s is None:
        return []
    return [f"link set {interface} gso_max_size {min(burst_bytes(rate_bit_s) // 2, _LARGEST_PIECE_BYTES)}"]


def delay_commands(interface: str, host: EmulatedHostSpec) -> list[str]:
    """For `tc -batch`: holds what an interface sends back for a while, inside its rate if it has one."""
    if host.delay_s is None:
        return []
    place = "root handle 2:" if host.rate_bit_s is None else "parent 1:1 handle 2:"
    # The queue has to hold what is under way: at least the rate times the delay, in packets.
    on_the_way = 0 if host.rate_bit_s is None else math.ceil(host.rate_bit_s / 8 * host.delay_s / 1514)
    delay_us = round(host.delay_s * 1e6)
    return [f"qdisc add dev {interface} {place} netem delay {delay_us}us limit {_NETEM_PACKETS + on_the_way}"]


def connect(switch: Namespace, namespaces: Sequence[Namespace], hosts: Sequence[EmulatedHostSpec]) -> None:
    """Connects all hosts by the switch, each at its rate, with its delay."""
    ip, tc = _tool("ip"), _tool("tc")
    ports = [(port_of(number), host.rate_bit_s) for number, host in enumerate(hosts)]
    pieces = [command for port in ports for command in piece_commands(*port)]
    _batch(switch, ip, [*switch_commands(namespaces), *pieces], pass_fds=[namespace.net for namespace in namespaces])
    _batch(switch, tc, [command for port in ports for command in rate_commands(*port)])
    for number, (namespace, host) in enumerate(zip(namespaces, hosts, strict=True)):
        _batch(namespace, ip, [*host_commands(number), *piece_commands(INTERFACE, host.rate_bit_s)])
        _batch(namespace, tc, rate_commands(INTERFACE, host.rate_bit_s))
        found = _try_batch(namespace, tc, delay_commands(INTERFACE, host))
        if found is not None:
            raise LaunchError(
                f"this kernel has no netem, which is what delays packets: tc says {found!r}.",
                hint="leave the delay out, or load it with `modprobe sch_netem`",
            )


def _tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=_TOOLS_PATH)
    if found is None:
        raise LaunchError(
            f"emulated hosts need the program {name!r}, which is not here.",
            hint="install iproute2: apt install iproute2",
        )
    return found


def _batch(namespace: Namespace, tool: str, commands: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
    found = _try_batch(namespace, tool, commands, pass_fds)
    if found is not None:
        if os.strerror(errno.EPERM) in found:
            raise not_allowed()
        raise LaunchError(
            f"the network of the emulated hosts could not be made: {tool} says {found!r}.",
            hint="the kernel has to have veth, bridge and sch_tbf: `modprobe -a veth bridge sch_tbf` loads them",
        )


def _try_batch(namespace: Namespace, tool: str, commands: Sequence[str], pass_fds: Sequence[int] = ()) -> str | None:
    """What a tool complained of; None when it did all it was told."""
    if not commands:
        return None
    done = namespace.run(tool, "-batch", "-", input="\n".join(commands) + "\n", pass_fds=pass_fds)
    if done.returncode == 0:
        return None
    return (done.stderr or done.stdout).strip().replace("\n", "; ") or f"exit code {done.returncode}"
