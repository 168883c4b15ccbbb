"""What hosts an emulation has, as `4@200mbit` says it, and what each of them is told of its place. Free of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from paceline.errors import UsageError

EMULATION_VARIABLE = "PACELINE_EMULATED"
"""In the environment of all that runs on an emulated host: its `EmulationInfo`, as JSON."""
CGROUP_VARIABLE = "PACELINE_HOST_CGROUP"
"""In the environment of a host with a share of the cores: the folder of the cgroup that its ranks enter."""
MOST_HOSTS = 64

_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE_WORDS = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}
_DELAY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LEAST_RATE, _LARGEST_RATE = 100e3, 100e9
_LONGEST_DELAY_S = 10.0
_NUMBER = r"\d+(?:\.\d+)?"
_GROUP = re.compile(
    rf"(?P<count>\d+)(?:@(?P<rate>{_NUMBER})(?P<rate_unit>[a-zA-Z]*))?(?:\+(?P<delay>{_NUMBER})(?P<delay_unit>[a-zA-Z]*))?"
)
_FORMS = "write it as 4, 4@200mbit, 4@200mbit+5ms or 2@1gbit,2@100mbit"


@dataclass(frozen=True)
class EmulatedHostSpec:
    """One emulated host's line to the switch."""

    rate_bit_s: float | None = None
    """Bits per second, each way; None for as fast as the machine copies."""
    delay_s: float | None = None
    """Added to what the host sends, so that a round trip between two such hosts takes twice as much longer."""

    def __str__(self) -> str:
        rate = "at full speed" if self.rate_bit_s is None else f"at {format_rate(self.rate_bit_s)} each way"
        return rate if self.delay_s is None else f"{rate}, {self.delay_s * 1e3:g} ms later"


def parse_hosts(text: str) -> tuple[EmulatedHostSpec, ...]:
    """Reads `4`, `4@200mbit`, `4@200mbit+5ms`, and several of these with commas between them."""
    hosts: list[EmulatedHostSpec] = []
    for group in text.split(","):
        match = _GROUP.fullmatch(group.strip())
        if match is None:
            raise UsageError(f"--emulate {text!r} does not say how many hosts, at which rate.", hint=_FORMS)
        rate = _quantity(match, "rate", _RATE_UNITS, text)
        delay = _quantity(match, "delay", _DELAY_UNITS, text)
        if rate is not None and not _LEAST_RATE <= rate <= _LARGEST_RATE:
            raise UsageError(f"a rate in --emulate {text!r} cannot be had.", hint="rates go from 100kbit to 100gbit")
        if delay is not None and not 0 < delay <= _LONGEST_DELAY_S:
            raise UsageError(f"a delay in --emulate {text!r} cannot be had.", hint="delays go up to 10s")
        hosts += [EmulatedHostSpec(rate, delay)] * min(int(match["count"]), MOST_HOSTS + 1)
    if not 0 < len(hosts) <= MOST_HOSTS:
        number = "no" if not hosts else f"more than {MOST_HOSTS}"
        raise UsageError(f"--emulate {text!r} asks for {number} hosts.", hint=f"it takes 1 to {MOST_HOSTS}")
    return tuple(hosts)


def _quantity(match: re.Match[str], name: str, units: Mapping[str, float], text: str) -> float | None:
    if match[name] is None:
        return None
    unit = match[f"{name}_unit"].lower()
    if unit not in units:
        found = f"the unit {unit!r}" if unit else "no unit"
        raise UsageError(f"the {name} in --emulate {text!r} has {found}.", hint=f"units are {', '.join(units)}")
    return float(match[name]) * units[unit]


def format_rate(rate_bit_s: float) -> str:
    """As 200 Mbit/s."""
    unit = next((unit for unit in ("gbit", "mbit") if rate_bit_s >= _RATE_UNITS[unit]), "kbit")
    return f"{rate_bit_s / _RATE_UNITS[unit]:g} {_RATE_WORDS[unit]}"


def format_hosts(hosts: tuple[EmulatedHostSpec, ...]) -> str:
    """As "4 emulated hosts at 200 Mbit/s each way"."""
    what = f"{len(hosts)} emulated host{'s' if len(hosts) > 1 else ''}"
    groups = [(kind, len(list(same))) for kind, same in groupby(hosts)]
    if len(groups) == 1:
        return f"{what} {hosts[0]}"
    return f"{what}: " + "; ".join(f"{number} {kind}" for kind, number in groups)


@dataclass(frozen=True, kw_only=True)
class EmulationInfo:
    """Which host of which emulation a process is on."""

    spec: str
    """What the user asked for, as `4@200mbit`."""
    host: int
    hosts: int
    master: str
    """ADDRESS:PORT where the hosts meet."""
    host_cpus: float | None = None
    """The cores that the ranks of this host share; None for no limit."""

    def variables(self) -> dict[str, str]:
        """What the environment of a process on this host says."""
        return {EMULATION_VARIABLE: json.dumps(asdict(self))}


_KINDS: dict[str, tuple[type, ...]] = {
    "spec": (str,),
    "host": (int,),
    "hosts": (int,),
    "master": (str,),
    "host_cpus": (int, float, type(None)),
}


def emulation_info(environment: Mapping[str, str]) -> EmulationInfo | None:
    """The emulated host that a process with this environment is on; None where it is on none."""
    text = environment.get(EMULATION_VARIABLE)
    if not text:
        return None
    try:
        values = json.loads(text)
        known = isinstance(values, dict) and values.keys() == _KINDS.keys()
    except ValueError:
        known = False
    if not known or not all(isinstance(values[name], kinds) for name, kinds in _KINDS.items()):
        raise UsageError(
            f"{EMULATION_VARIABLE} is set to what Paceline did not write.", hint=f"unset {EMULATION_VARIABLE}"
        )
    return EmulationInfo(**values)


def emulation_of(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What a record says of the emulation it was made in: what was asked for; None on real hosts."""
    place = emulation_info(environment)
    return None if place is None else {"spec": place.spec, "host_cpus": place.host_cpus}
