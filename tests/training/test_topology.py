"""Topology of a run in the record."""

from __future__ import annotations

from torch import nn

from paceline.comm import Comm
from paceline.config import RunConfig
from paceline.records import Topology
from paceline.strategies.registry import create
from paceline.training.placement import Placement
from paceline.training.topology import topology_of
from ranks import Pool


def make_topology(comm: Comm, model: nn.Module, batch: int | None) -> Topology:
    config = RunConfig(strategy="p2p", slow_rank="1:3")
    return topology_of(
        config,
        create(config.strategy),
        model,
        comm,
        Placement(comm.device, comm.backend, threads=2),
        workload="own",
        interface="lo",
        world_size=comm.world_size,
        ranks_per_host=comm.world_size,
        batch=batch,
    )


def test_layers_whose_result_depends_on_the_sharding_are_counted(pool: Pool) -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Sequential(nn.AlphaDropout(0.1), nn.Dropout2d(0.2))
    )
    found = pool.run(make_topology, 3, model, 64)[0]
    assert (found.batch_norm_layers, found.random_layers) == (1, 3)
    assert (found.parameters, found.gradient_bytes) == (10, 40)


def test_dropout_that_drops_nothing_is_not_random(pool: Pool) -> None:
    assert pool.run(make_topology, 1, nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), 8)[0].random_layers == 0


def test_shares_of_a_batch_may_differ_by_one_sample(pool: Pool) -> None:
    (found, *others) = pool.run(make_topology, 3, nn.Linear(2, 2), 64)
    assert (found.batch_per_rank, found.workers, found.servers) == ([21, 22], 3, 0)
    assert (found.strategy, found.sends, found.slow_rank, found.emulated) == ("p2p", "singly", "1:3", None)
    assert others[:2] == [found, found]
    assert pool.run(make_topology, 2, nn.Linear(2, 2), None)[0].batch_per_rank == [], "a script's batch is unknown"
