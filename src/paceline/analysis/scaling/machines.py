"""What ranks of a scaling experiment compute on: hosts that share a machine, ranks that share its cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline.config.emulation import EmulatedHostSpec, parse_hosts
from paceline.errors import UsageError

SAME_PROCESSOR = 0.01
"""By how much what two ranks compute with may differ for them to have had the same."""


def machines_of(design: Mapping[str, Any], hosts: int) -> list[int]:
    """For each of the first hosts the number of its machine; where the record does not say, they share one."""
    named = list(design.get("machines") or [])
    return named[:hosts] if len(named) >= hosts else [0] * hosts


def sharing(design: Mapping[str, Any], hosts: int, ranks_per_host: int) -> int:
    """The most ranks that share cores: those of a host with a share of its own, or of all hosts on one machine.

    A rank that its launcher bound to cores of its own shares them with none of its host.
    """
    if design.get("host_cpus") is not None:
        return ranks_per_host
    return (1 if design.get("bound") else ranks_per_host) * max(Counter(machines_of(design, hosts)).values())


def processor(topology: Mapping[str, Any], design: Mapping[str, Any]) -> float:
    """Cores that a rank has to compute with; 1 where it is a GPU that does."""
    if topology["device"] != "cpu":
        return 1.0
    return float(min(topology["threads"], topology["cores"] / _sharing(topology, design)))


def crowding(topology: Mapping[str, Any], design: Mapping[str, Any]) -> str:
    """Why ranks have not got a core or GPU each, in words; nothing where they have, or each host has its share."""
    together, share = _sharing(topology, design), design.get("host_cpus")
    if topology["device"] != "cpu":
        gpus = design.get("gpus") or together
        return f"{together} ranks share {gpus} GPU{'s' * (gpus > 1)}" if together > gpus else ""
    if share is not None:
        hosts, cores = _hosts(topology), design.get("machine_cores")
        over = cores is not None and share * hosts > cores * (1 + SAME_PROCESSOR)
        return f"{hosts} hosts of {cores_in_words(share)} each share {cores:g}" if over else ""
    cores = topology["cores"]
    return f"{together} ranks share {cores_in_words(cores)}" if together > max(1.0, cores) else ""


def cores_in_words(number: float) -> str:
    """As "0.5 core" or "2 cores"."""
    return f"{number:.3g} core" + ("" if number <= 1 else "s")


def _sharing(topology: Mapping[str, Any], design: Mapping[str, Any]) -> int:
    return min(int(topology["workers"]), sharing(design, _hosts(topology), int(topology["ranks_per_host"])))


def _hosts(topology: Mapping[str, Any]) -> int:
    return -(-int(topology["workers"]) // int(topology["ranks_per_host"]))


def is_packed(design: Mapping[str, Any], hosts: int, ranks_per_host: int) -> bool:
    """Whether ranks are on fewer hosts than they might be, though nobody asked for that: their number does not fit."""
    there = len(design.get("machines") or [])
    return not design.get("ranks_per_host_asked") and hosts < min(there, hosts * ranks_per_host)


def placements(design: Mapping[str, Any], shapes: Iterable[tuple[int, int]]) -> Iterator[str]:
    """What to know of where ranks were put, of shapes as (hosts, ranks on each)."""
    ordered = sorted(set(shapes), key=lambda shape: (shape[0] * shape[1], shape[0]))
    widest = {hosts * number: (hosts, number) for hosts, number in ordered}
    for hosts, number in widest.values():
        if is_packed(design, hosts, number):
            there = "all of them are on one" if hosts == 1 else f"they are on {hosts}"
            yield f"{hosts * number} ranks cannot be put evenly on {len(design['machines'])} hosts: {there}."
    yield from _unlike(design, sorted({hosts for hosts, _ in ordered}))


def _unlike(design: Mapping[str, Any], hosts: Sequence[int]) -> Iterator[str]:
    """Which of several kinds of hosts are used where not all are."""
    try:
        emulated = parse_hosts(design.get("emulated") or "1")
    except UsageError:  # Of a record that was tampered with, or is newer than we are.
        return
    fewer = [number for number in hosts if number < len(emulated)]
    if len(set(emulated)) > 1 and fewer:
        each = [f"{_first(number)} ({_lines(emulated[:number])})" for number in fewer]
        yield f"Hosts are not alike, and the first of them are used first: {'; '.join(each)}."


def _first(hosts: int) -> str:
    return "one host is host 0" if hosts == 1 else f"{hosts} hosts are hosts 0 to {hosts - 1}"


def _lines(hosts: Sequence[EmulatedHostSpec]) -> str:
    """As "2 at 1 Gbit/s each way, 1 at 100 Mbit/s each way"."""
    counted = Counter(hosts)
    return str(hosts[0]) if len(counted) == 1 else ", ".join(f"{number} {kind}" for kind, number in counted.items())
