"""Check that all ranks have the same data: they compare its length and fingerprints of a few samples.

Ranks that load different data train wrongly without any other sign: shares overlap, and samples that one rank holds out
are trained on another. All generators that can be seeded are seeded equally before the data is made, so a difference
comes from a generator of the user's own, from the order of a set or a folder, or from the time.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from paceline.comm.control import ControlChannel
from paceline.comm.messages.json_messages import gather_typed
from paceline.errors import PacelineError, WorkloadError
from paceline.formatting import join_names, whole
from paceline.workloads.batches import FIRST_BATCH, Source
from paceline.workloads.fingerprint import Fingerprint, fingerprint
from paceline.workloads.random_state import seeded

REREADS = 8
"""Number of times that a sample which differs between ranks is read again. Augmentation by a generator of the data set
shows then, even if it changes only half of the samples."""
HINT = (
    "seed every generator of your own with the run's seed, as in numpy.random.default_rng(config.seed), and sort what "
    "comes from a set or a folder"
)


class DataOfRank(msgspec.Struct, frozen=True):
    """Length and fingerprints of one rank's data."""

    length: int | None
    probes: dict[str, Fingerprint]


def check_same_data(sources: Mapping[str, Source], control: ControlChannel) -> None:
    """Raise on all ranks if they have different data; `sources` are by name, for example "training data".

    Samples that a data set augments differ between ranks, and each time that they are read. Of such samples only the
    parts that stay the same are compared.
    """
    if control.group.size() == 1:
        return
    own = {name: DataOfRank(source.samples, _fingerprints(name, source)) for name, source in sources.items()}
    by_rank = gather_typed(own, dict[str, DataOfRank], control)
    for name, source in sources.items():
        _check_one(name, source, [rank[name] for rank in by_rank], control)


def _check_one(name: str, source: Source, by_rank: list[DataOfRank], control: ControlChannel) -> None:
    lengths = [rank.length for rank in by_rank]
    if len(set(lengths)) > 1:
        other = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
        counts = [whole(length) if length is not None else "an unknown number of" for length in lengths]
        raise WorkloadError(
            f"the {name} differs between ranks: rank 0 has {counts[0]} samples and rank {other} {counts[other]}.",
            hint=HINT,
        )
    probes = [rank.probes for rank in by_rank]
    suspects = [probe for probe in probes[0] if _ranks_that_differ(probe, probes, set())]
    if not suspects:
        return
    changing = _changing_leaves(name, source, suspects, control)
    if FIRST_BATCH in suspects and changing >= probes[0][FIRST_BATCH].keys() - _lengths(probes[0][FIRST_BATCH]):
        changing = set()  # Nothing of the batch stays the same: its samples are others, not only augmented.
    for probe in suspects:
        ranks = _ranks_that_differ(probe, probes, changing)
        if ranks:
            others = join_names([str(rank) for rank in ranks])
            plural = "ranks" if len(ranks) > 1 else "rank"
            raise WorkloadError(
                f"the {name} differs between ranks: {probe} is not the same on {plural} {others} as on rank 0.",
                hint=HINT,
            )


def _fingerprints(name: str, source: Source) -> dict[str, Fingerprint]:
    return {probe: _read(name, probe, read, number) for number, (probe, read) in enumerate(source.probes().items())}


def _read(name: str, probe: str, read: Callable[[], Any], number: int) -> Fingerprint:
    """Read a part of the data with the same random numbers on all ranks and at every call."""
    try:
        with seeded(number):
            return fingerprint(read())
    except PacelineError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"reading {probe} of the {name} failed: {type(error).__name__}: {error}",
            hint="correct the data; the traceback above shows where it failed",
            detail=traceback.format_exc().rstrip(),
        ) from None


def _differing_leaves(one: Fingerprint, other: Fingerprint) -> set[str]:
    """Return the parts that two readings of a sample do not share."""
    return {
        path for path in {**one, **other} if path not in one or path not in other or not one[path].matches(other[path])
    }


def _ranks_that_differ(probe: str, by_rank: list[dict[str, Fingerprint]], ignored: set[str]) -> list[int]:
    first = by_rank[0][probe]
    return [rank for rank, probes in enumerate(by_rank) if _differing_leaves(first, probes.get(probe, {})) - ignored]


def _changing_leaves(name: str, source: Source, suspects: list[str], control: ControlChannel) -> set[str]:
    """Return the parts of samples that are others each time that they are read, on any rank."""
    found: set[str] = set()
    for number, (probe, read) in enumerate(source.probes().items()):
        if probe in suspects:
            first, *again = [_read(name, probe, read, number) for _ in range(1 + REREADS)]
            for one in again:
                found |= _differing_leaves(first, one)
    return {path for own in gather_typed(sorted(found), list[str], control) for path in own}


def _lengths(parts: Fingerprint) -> set[str]:
    return {path for path in parts if path.rpartition(".")[2] == "length"}
