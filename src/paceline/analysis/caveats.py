"""What a reader has to know before believing a comparison: other machines, other moments, ranks that share cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.analysis.pool import Pool


def caveats(pool: Pool, uneven: Mapping[str, float | None]) -> Iterator[str]:
    """The sentences to show above the table; `uneven` says by how much a contender's ranks differ."""
    machines = {(p.get("host"), p.get("cpu")) for p in pool.provenances}
    if len(machines) > 1:
        names = ", ".join(sorted(f"{host} ({cpu})" for host, cpu in machines))
        yield f"These records come from different machines: {names}. Their times cannot be compared."
    versions = {str(p.get("versions", {}).get("torch")) for p in pool.provenances}
    if len(versions) > 1:
        yield f"These records come from different versions of torch: {', '.join(sorted(versions))}."
    if len(pool.designs) > 1 or (not pool.designs and len(pool.entries) > 1):
        yield "These runs were not measured interleaved, so a busy moment of the machine may look like a difference."
    over = next((entry.run.topology for entry in pool.entries if over_subscribed(entry.run.topology)), None)
    if over:
        yield (
            f"{over['workers']} ranks share {over['cores']:g} cores, so they wait for each other's turn: "
            "times compare strategies on this machine, and say nothing about more machines."
        )
    yield from (event["reason"] for event in pool.events if event["event"] == "unproven")
    for name, apart in uneven.items():
        if apart is not None:
            yield (
                f"{name}: time per iteration differs by {100 * apart:.0f}% between ranks, "
                "which a synchronous run should not show."
            )


def over_subscribed(topology: Mapping[str, Any]) -> bool:
    """Whether the ranks of a host compute with more threads than it has cores."""
    threads = min(topology["workers"], topology["ranks_per_host"]) * topology["threads"]
    return bool(topology["device"] == "cpu" and threads > topology["cores"])
