"""Who starts which ranks: where this process sits in its launch, and the parts of a job. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.config import LaunchConfig
from paceline.errors import LaunchError, UsageError
from paceline.launch.seat import Hello, Part, Seat, Shape
from paceline.launch.slurm import seat_from_slurm

_TORCHRUNS = "torchrun sets it; where nothing like it has started this, unset RANK and WORLD_SIZE"


def find_seat(launch: LaunchConfig, environment: Mapping[str, str]) -> Seat:
    """Where this process sits: torchrun's or Slurm's word, or the user's."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _seat_from_torchrun(launch, environment)
    slurm = seat_from_slurm(environment, launch)
    if slurm is not None:
        return slurm
    if launch.hosts > 1 and launch.master is None:
        raise UsageError(
            f"--hosts {launch.hosts} was given without --master.",
            hint="name host 0 and a free port on it, as --master 198.18.0.1:29500",
        )
    return Seat(number=launch.node_rank, seats=launch.hosts, node=launch.node_rank, master=launch.master)


def parts_of(shape: Shape, seat: Seat, hellos: Sequence[Hello]) -> list[Part]:
    """Who starts which ranks: those of one host stand together, whatever the order of the seats."""
    nodes: dict[int, list[Hello]] = {}
    for hello in hellos:
        nodes.setdefault(hello.node, []).append(hello)
    if shape.hosts > len(nodes):
        raise UsageError(f"{shape.hosts} hosts are asked for, but there are {len(nodes)}.")
    chosen = list(nodes.values())[: shape.hosts]
    if seat.ranks is None:
        starters = [(hellos[0], 0) for hellos in chosen]
    else:
        starters = [(hello, local) for hellos in chosen for local, hello in enumerate(hellos[: shape.ranks_per_host])]
    if len(starters) * (seat.ranks or shape.ranks_per_host) != shape.ranks:
        raise UsageError(
            f"{shape.ranks_per_host} ranks on each of {shape.hosts} hosts are asked for, but there are not as many.",
            hint="a run needs as many ranks on every host",
        )
    return [
        Part(
            seat=hello.seat,
            number=number,
            parts=len(starters),
            ranks=seat.ranks or shape.ranks_per_host,
            local_rank=local,
            local_size=shape.ranks_per_host,
            sharing=_sharing(hello, [other for other, _ in starters], seat.ranks or shape.ranks_per_host),
        )
        for number, (hello, local) in enumerate(starters)
    ]


def _sharing(hello: Hello, starters: Sequence[Hello], ranks: int) -> int:
    """Ranks on the same cores: Slurm may bind each to its own, torchrun leaves all to all."""
    return ranks * sum(other.node == hello.node and other.cores == hello.cores for other in starters)


def _seat_from_torchrun(launch: LaunchConfig, environment: Mapping[str, str]) -> Seat:
    size = _told(environment, "WORLD_SIZE", least=1)
    local_size = _told(environment, "LOCAL_WORLD_SIZE", default=size, least=1)
    number = _told(environment, "RANK")
    if number >= size:
        raise LaunchError(f"RANK is {number}, but WORLD_SIZE is {size}.", hint=_TORCHRUNS)
    if launch.hosts > 1 or launch.ranks not in (None, size) or launch.ranks_per_host not in (None, local_size):
        asked = next(
            f"--{name.replace('_', '-')} {getattr(launch, name)}"
            for name in ("hosts", "ranks", "ranks_per_host")
            if getattr(launch, name) not in (None, 1)
        )
        raise UsageError(
            f"{asked} was given, but the launcher started {size} ranks, {local_size} on this host.",
            hint="leave it out under torchrun, and set its --nnodes and --nproc-per-node",
        )
    return Seat(
        number=number,
        seats=size,
        ranks=1,
        node=_told(environment, "GROUP_RANK", default=0),
        local_rank=_told(environment, "LOCAL_RANK", default=number),
        local_size=local_size,
        launcher="torchrun",
    )


def _told(environment: Mapping[str, str], name: str, *, default: int = 0, least: int = 0) -> int:
    """A number that torchrun sets, or whoever does as it does."""
    text = environment.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise LaunchError(f"{name} should be a number of {least} or more, but it is {text!r}.", hint=_TORCHRUNS)
    return int(text)
