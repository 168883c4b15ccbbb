"""What a measured link says of sizes in between, and of sizes that were too long to measure."""

from __future__ import annotations

import itertools

from paceline.records.examination import AllReduceTimes


def all_reduce_s(measured: AllReduceTimes, size: float) -> float:
    """Seconds that an all-reduce of some bytes takes.

    Between two sizes that were measured a line joins them; above the largest its bandwidth holds; below the smallest
    latency is all there is.
    """
    points = measured.points
    if size <= points[0].bytes:
        return points[0].time_s
    for one, other in itertools.pairwise(points):
        if size <= other.bytes:
            share = (size - one.bytes) / (other.bytes - one.bytes)
            return one.time_s + share * (other.time_s - one.time_s)
    return points[-1].time_s * size / points[-1].bytes
