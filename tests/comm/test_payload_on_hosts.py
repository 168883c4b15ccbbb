"""The proof of bytes on emulated hosts: for every strategy, sockets carry the plan and its framing."""

from __future__ import annotations

from typing import Any

import pytest

from commands import LIMIT_S, start
from experiments_on_disk import read_comparison
from paceline.report.terminal.comparison import to_json
from paceline.strategies.registry import ENTRIES

pytestmark = pytest.mark.takes(20)

HOSTS = 3
STRATEGIES = [*ENTRIES, "ddp:bucket_mb=0.05"]
HEADERS = 0.1
"""Headers of TCP, IP and Ethernet, acknowledgements, and the loop's own messages add less than this share."""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `compare` says of all strategies, a rank on each of three hosts."""
    out = tmp_path_factory.mktemp("proof") / "out"
    where = ("--emulate", f"{HOSTS}@500mbit", "--ranks-per-host", "1", "--threads", "1")
    what = ("cnn", "--strategies", ",".join(STRATEGIES), "--batch", "12", "--steps", "15", "--no-evaluate")
    how = ("--repeats", "1", "--max-repeats", "1", "--no-proof", "--no-doctor", "--out", str(out))
    with start("compare", *what, *where, *how) as process:
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert "by the kernel's count" not in said, "that is how it would say that something is not as planned"
    return to_json(read_comparison(out))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_pair_of_hosts_sends_what_was_planned(result: dict[str, Any], strategy: str) -> None:
    payload = result["payload"][strategy]
    assert payload["against"] == "the plan"
    assert payload["steps"] == 10
    assert payload["deviation"] <= 0.01
    assert payload["holds"] is True
    planned = sum(rank["planned_sent_bytes"] for rank in payload["ranks"])
    assert (planned > 0) == (strategy not in ("single", "none")), "there is something to prove"


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("single", "none")])
def test_the_interfaces_of_the_hosts_carry_it_too(result: dict[str, Any], strategy: str) -> None:
    payload = result["payload"][strategy]
    assert [(host["interface"], host["ranks"]) for host in payload["hosts"]] == [
        ("eth0", [rank]) for rank in range(HOSTS)
    ]
    for host, rank in zip(payload["hosts"], payload["ranks"], strict=True):
        for counter in ("sent_bytes", "received_bytes"):
            assert rank[counter] <= host[counter] <= (1 + HEADERS) * rank[counter] + 20_000, (host, rank)


@pytest.mark.parametrize("strategy", ["gather_scatter", "p2p"])
def test_the_burden_of_rank_0_is_a_measured_fact(result: dict[str, Any], strategy: str) -> None:
    matrix = result["payload"][strategy]["matrix"]
    assert sum(matrix[0]) == pytest.approx((HOSTS - 1) * sum(matrix[1]))
    assert matrix[1][2] == matrix[2][1] == 0
    assert any(strategy in said and "rank 0 moves" in said and "measured" in said for said in result["verdict"])
