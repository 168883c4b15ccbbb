"""Parse `--emulate 4@200mbit`, and describe to a process the emulated host that it runs on. Free of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby

from paceline.config.whole_number import whole_number
from paceline.errors import UsageError
from paceline.formatting import bit_rate, plural, short

EMULATION_VARIABLE = "PACELINE_EMULATED"
"""Environment variable of all processes on an emulated host: its `EmulationInfo` as JSON."""
CGROUP_VARIABLE = "PACELINE_HOST_CGROUP"
"""Environment variable on a host with limited cores: the folder of the cgroup that its ranks enter."""
MOST_HOSTS = 64

_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DELAY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LEAST_RATE, _LARGEST_RATE = 100e3, 100e9
_LONGEST_DELAY_S = 10.0
_NUMBER = r"\d{1,18}(?:\.\d{1,18})?"
_GROUP = re.compile(
    rf"(?P<count>\d+)(?:@(?P<rate>{_NUMBER})(?P<rate_unit>[a-zA-Z]*))?"
    rf"(?:\+(?P<delay>{_NUMBER})(?P<delay_unit>[a-zA-Z]*))?",
    re.ASCII,
)
_FORMS = "write it as 4, 4@200mbit, 4@200mbit+5ms or 2@1gbit,2@100mbit"


@dataclass(frozen=True)
class EmulatedHostSpec:
    """Link of one emulated host to the switch."""

    rate_bit_s: float | None = None
    """Bits per second in each direction; None for no limit."""
    delay_s: float | None = None
    """Delay of packets that the host sends; a round trip between two such hosts takes twice this longer."""

    def __str__(self) -> str:
        rate = "at full speed" if self.rate_bit_s is None else f"at {bit_rate(self.rate_bit_s)} each way"
        return rate if self.delay_s is None else f"{rate}, {short(self.delay_s * 1e3)} ms delay"


def parse_hosts(text: str) -> tuple[EmulatedHostSpec, ...]:
    """Parse `4`, `4@200mbit`, `4@200mbit+5ms`, or several of these separated by commas."""
    hosts: list[EmulatedHostSpec] = []
    for group in text.split(","):
        match = _GROUP.fullmatch(group.strip())
        if match is None:
            raise UsageError(f"--emulate {text!r} is not a number of hosts with an optional rate.", hint=_FORMS)
        rate = _quantity(match, "rate", _RATE_UNITS, text)
        delay = _quantity(match, "delay", _DELAY_UNITS, text)
        if rate is not None and not _LEAST_RATE <= rate <= _LARGEST_RATE:
            raise UsageError(f"a rate in --emulate {text!r} is out of range.", hint="use 100kbit to 100gbit")
        if delay is not None and not 0 < delay <= _LONGEST_DELAY_S:
            raise UsageError(f"a delay in --emulate {text!r} is out of range.", hint="use more than 0 and at most 10s")
        count = whole_number(match["count"])
        hosts += [EmulatedHostSpec(rate, delay)] * (MOST_HOSTS + 1 if count is None else min(count, MOST_HOSTS + 1))
    if not 0 < len(hosts) <= MOST_HOSTS:
        number = "no" if not hosts else f"more than {MOST_HOSTS}"
        raise UsageError(f"--emulate {text!r} asks for {number} hosts.", hint=f"ask for 1 to {MOST_HOSTS}")
    return tuple(hosts)


def payload_bytes_per_s(rate_bit_s: float) -> float:
    """Return the bytes of payload per second at a rate: 1448 of the 1514 bytes of a packet."""
    return rate_bit_s / 8 * 1448 / 1514


def _quantity(match: re.Match[str], name: str, units: Mapping[str, float], text: str) -> float | None:
    if match[name] is None:
        return None
    unit = match[f"{name}_unit"].lower()
    if unit not in units:
        found = f"the unit {unit!r}" if unit else "no unit"
        raise UsageError(f"the {name} in --emulate {text!r} has {found}.", hint=f"units are {', '.join(units)}")
    return float(match[name]) * units[unit]


def format_hosts(hosts: tuple[EmulatedHostSpec, ...]) -> str:
    """Format hosts, as in "4 emulated hosts at 200 Mbit/s each way"."""
    what = plural(len(hosts), "emulated host")
    groups = [(kind, len(list(same))) for kind, same in groupby(hosts)]
    if len(groups) == 1:
        return f"{what} {hosts[0]}"
    return f"{what}: " + "; ".join(f"{number} {kind}" for kind, number in groups)


@dataclass(frozen=True, kw_only=True)
class EmulationInfo:
    """The emulated host that a process runs on, and the emulation it belongs to."""

    spec: str
    """Value of `--emulate`, as in `4@200mbit`."""
    host: int
    hosts: int
    master: str
    """ADDRESS:PORT of host 0, to which all hosts connect."""
    host_cpus: float | None = None
    """Cores that the ranks of this host share; None for no limit."""

    def variables(self) -> dict[str, str]:
        """Return the environment variables that describe this host to its processes."""
        return {EMULATION_VARIABLE: json.dumps(asdict(self))}


def emulation_info(environment: Mapping[str, str]) -> EmulationInfo | None:
    """Return the emulated host that a process with this environment runs on; None on a real host."""
    text = environment.get(EMULATION_VARIABLE)
    if not text:
        return None
    import msgspec  # Only on emulated hosts: `paceline --help` does not need it.

    try:
        return msgspec.json.decode(text, type=EmulationInfo)
    except ValueError:
        raise UsageError(f"{EMULATION_VARIABLE} was not set by Paceline.", hint=f"unset {EMULATION_VARIABLE}") from None
