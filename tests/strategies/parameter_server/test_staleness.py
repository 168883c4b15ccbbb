"""Statistics of gradient staleness over several servers."""

from __future__ import annotations

from paceline.strategies.parameter_server.staleness import Staleness


def test_counts_of_servers_are_added() -> None:
    total = Staleness()
    for staleness in (3, 0, 3):
        total.count(staleness)
    total.add(Staleness({0: 1, 5: 2}, damped=1, dropped=2))
    summary = total.summary(None)
    assert summary.counts == [(0, 2), (3, 2), (5, 2)]
    assert (summary.gradients, summary.mean, summary.median, summary.max) == (6, 16 / 6, 3, 5)
    assert (summary.damped, summary.dropped) == (1, 2)
