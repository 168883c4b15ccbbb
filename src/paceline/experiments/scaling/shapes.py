"""Choose the shapes of ranks that `paceline scale` measures on the hosts available. Free of torch."""

from __future__ import annotations

from paceline.config import PointsConfig
from paceline.errors import UsageError
from paceline.formatting import plural
from paceline.launch.launcher_process import LauncherProcess, Shape

ALONE = Shape(1, 1)


def choose_shapes(config: PointsConfig, launcher: LauncherProcess, on_one_host: int) -> list[Shape]:
    """Return the shapes to measure, fewest ranks first, then most hosts first; one rank is always included.

    `on_one_host` is the most ranks per host unless the user gives a number: its GPUs or cores.
    """
    hosts = launcher.hosts
    room = launcher.local_size if launcher.ranks is not None else None
    counts = config.rank_counts or _powers(
        hosts * max(config.per_host, default=room or (on_one_host if hosts == 1 else 1))
    )
    shapes = {ALONE}
    for ranks in counts:
        ways = [number for number in config.per_host or _fewest(ranks, hosts) if ranks % number == 0]
        fitting = [Shape(ranks // number, number) for number in ways if ranks // number <= hosts]
        fitting = [shape for shape in fitting if room is None or shape.ranks_per_host <= room]
        if (
            not fitting and ranks > 1 and (config.rank_counts or ranks == counts[-1])
        ):  # Default powers of two may not fit.
            raise _does_not_fit(ranks, hosts, config, room)
        shapes |= set(fitting)
    return sorted(shapes, key=lambda shape: (shape.ranks, -shape.hosts))


def _powers(most: int) -> list[int]:
    """Return the powers of two up to a number, and the number itself."""
    powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]
    return sorted({*powers, most})


def _fewest(ranks: int, hosts: int) -> list[int]:
    """Return the fewest ranks per host that divide a world size evenly over the hosts."""
    return [number for number in range(1, ranks + 1) if ranks % number == 0 and ranks // number <= hosts][:1]


def _does_not_fit(ranks: int, hosts: int, config: PointsConfig, room: int | None) -> UsageError:
    there = plural(hosts, "host") + (f" with {room} ranks each" if room is not None else "")
    if config.per_host:
        named = " or ".join(map(str, config.per_host))
        return UsageError(
            f"{ranks} ranks cannot be put on {there} with {named} on each.",
            hint="leave out --ranks-per-host, or give --ranks that it divides",
        )
    return UsageError(f"{ranks} ranks cannot be put evenly on {there}.", hint="give other --ranks, or more hosts")
