"""Plans of the classic strategies: bytes against formulas, buckets against PyTorch's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.plans import Gradient, Operation, Plan, Transfer, all_reduce_lower_bound, classic, operations
from paceline.plans.framing import RingSegments
from paceline.strategies.registry import create
from paceline.workloads.models import MODELS
from ranks import Pool

RANKS = range(1, 9)
ITEMS = [1, 7, 10, 64, 840, 1_000_003]
MIB = 2**20
GRADIENTS = [Gradient("a", 1000, ready_s=0.3), Gradient("b", 7, ready_s=0.2), Gradient("c", 501, 8, ready_s=0.1)]
BYTES = 4000 + 28 + 4008
PLANS = [classic.nothing, classic.gather_scatter, classic.p2p, classic.allreduce, classic.ddp]


def gradients_of(model: nn.Module) -> list[Gradient]:
    return [Gradient(name, p.numel(), p.element_size()) for name, p in model.named_parameters()]


def totals(plan: Plan, ranks: int) -> tuple[int, int]:
    return sum(map(plan.sent_bytes, range(ranks))), sum(map(plan.received_bytes, range(ranks)))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("items", ITEMS)
def test_all_reduce_sends_its_share_through_every_rank(ranks: int, items: int) -> None:
    plan = Plan((operations.all_reduce(items, 4, ranks, 0.0),))
    share = 2 * (ranks - 1) / ranks * items * 4
    for rank in range(ranks):
        # Two chunks are sent only once, and each differs from an equal share by less than an item per segment.
        assert abs(plan.sent_bytes(rank) - share) < 2 * (2 * ranks) * 4
        assert abs(plan.received_bytes(rank) - share) < 2 * (2 * ranks) * 4
    assert totals(plan, ranks) == (2 * (ranks - 1) * items * 4,) * 2
    if items % (2 * ranks) == 0:
        assert {plan.sent_bytes(rank) for rank in range(ranks)} == {share}


@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduce_is_a_ring(ranks: int) -> None:
    operation = operations.all_reduce(100, 4, ranks, 0.5)
    assert (operation.kind, operation.algorithm, operation.bytes, operation.earliest_s) == (
        "all_reduce",
        "ring",
        400,
        0.5,
    )
    expected = {(rank, (rank - 1) % ranks) for rank in range(ranks)} if ranks > 1 else set()
    assert {(t.source, t.target) for t in operation.transfers} == expected
    assert len(operation.transfers) == len(expected)


def run_ring(chunks: list[int]) -> list[int]:
    """Pass chunks around a ring, check that all ranks get all sums, and return the items that each rank sent."""
    ranks = len(chunks)
    held = [[{rank} for _ in chunks] for rank in range(ranks)]  # Ranks whose values are in a rank's copy of a chunk.
    sent = [0] * ranks
    for first in (1, 0):  # Reduce, then gather: a rank sends the chunk that it received last.
        for step in range(ranks - 1):
            moves = [(rank, (rank + first + step) % ranks) for rank in range(ranks)]
            arriving = [set(held[rank][chunk]) for rank, chunk in moves]
            for (rank, chunk), summands in zip(moves, arriving, strict=True):
                held[rank - 1][chunk] |= summands
                sent[rank] += chunks[chunk]
    assert held == [[set(range(ranks))] * ranks] * ranks
    return sent


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("items", ITEMS)
def test_all_reduce_sends_what_a_simulated_ring_sends(ranks: int, items: int) -> None:
    plan = Plan((operations.all_reduce(items, 1, ranks, 0.0),))
    chunks = [RingSegments.of_all_reduce(items, 1, ranks).chunk(rank)[0] for rank in range(ranks)]
    assert sum(chunks) == items
    assert [plan.sent_bytes(rank) for rank in range(ranks)] == run_ring(chunks)


@pytest.mark.parametrize("ranks", RANKS)
def test_gather_and_scatter_load_the_root(ranks: int) -> None:
    gradient = Gradient("w", 13, 8)
    gather, scatter = operations.gather(gradient, ranks, 0.0), operations.scatter(gradient, ranks, 0.0)
    assert gather.bytes == scatter.bytes == ranks * 104
    for plan, into_root in ((Plan((gather,)), True), (Plan((scatter,)), False)):
        to_root, from_root = plan.received_bytes(0), plan.sent_bytes(0)
        assert (to_root, from_root) == (((ranks - 1) * 104, 0) if into_root else (0, (ranks - 1) * 104))
        for rank in range(1, ranks):
            own = (plan.sent_bytes(rank), plan.received_bytes(rank))
            assert own == ((104, 0) if into_root else (0, 104))


@pytest.mark.parametrize("ranks", range(1, 34))
def test_broadcast_is_a_tree_that_reaches_every_rank_once(ranks: int) -> None:
    operation = operations.broadcast(100, ranks)
    plan = Plan((operation,))
    assert plan.sent_bytes(0) == math.ceil(math.log2(ranks)) * 100
    assert sorted(t.target for t in operation.transfers) == list(range(1, ranks))
    assert all(plan.received_bytes(rank) == 100 for rank in range(1, ranks))
    reached = {0}
    for transfer in operation.transfers:
        assert transfer.source in reached, "a rank sends only what it has received"
        reached.add(transfer.target)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_sent_arrives(plan: type, ranks: int) -> None:
    made = plan(GRADIENTS, ranks)
    sent, received = totals(made, ranks)
    assert sent == received
    for operation in made.operations:
        assert all(t.source != t.target for t in operation.transfers)
        assert all(0 <= t.source < ranks and 0 <= t.target < ranks for t in operation.transfers)


@pytest.mark.parametrize("plan", PLANS)
def test_a_world_of_one_sends_nothing(plan: type) -> None:
    made = plan(GRADIENTS, 1)
    assert made == Plan(())
    assert made.busiest_rank_bytes(1) == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_single_and_none_send_nothing(ranks: int) -> None:
    assert classic.nothing(GRADIENTS, ranks) == Plan(())


@pytest.mark.parametrize("plan", PLANS)
def test_a_model_without_gradients_sends_nothing(plan: type) -> None:
    assert plan([], 4) == Plan(())


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize(
    ("plan", "kinds"), [(classic.gather_scatter, ("gather", "scatter")), (classic.p2p, ("send",) * 2)]
)
def test_through_rank_0(plan: type, kinds: tuple[str, str], ranks: int) -> None:
    made = plan(GRADIENTS, ranks)
    assert [operation.kind for operation in made.operations] == list(kinds) * len(GRADIENTS)
    assert made.sent_bytes(0) == made.received_bytes(0) == (ranks - 1) * BYTES
    assert all(made.sent_bytes(rank) == made.received_bytes(rank) == BYTES for rank in range(1, ranks))
    assert made.busiest_rank_bytes(ranks) == (ranks - 1) * BYTES
    assert {operation.earliest_s for operation in made.operations} == {0.3}, "after all of backward"


def test_allreduce_has_one_operation_per_parameter_in_the_order_of_the_model() -> None:
    made = classic.allreduce(GRADIENTS, 4)
    assert [operation.bytes for operation in made.operations] == [4000, 28, 4008]
    assert {operation.earliest_s for operation in made.operations} == {0.3}


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=6), st.integers(1, 12), st.sampled_from([2, 4, 8]))
def test_no_strategy_beats_the_lower_bound(items: list[int], ranks: int, item_bytes: int) -> None:
    gradients = [Gradient(str(index), count, item_bytes) for index, count in enumerate(items)]
    bound = all_reduce_lower_bound(sum(items), item_bytes, ranks)
    for plan in (classic.gather_scatter, classic.p2p, classic.allreduce, classic.ddp):
        assert plan(gradients, ranks).busiest_rank_bytes(ranks) >= bound
    # One ring exceeds the bound by at most an item per segment of its two uneven chunks.
    segments = max(2, sum(items) * item_bytes // MIB + 1) + ranks
    assert (
        classic.ddp(gradients, ranks, bucket_mb=1e6).busiest_rank_bytes(ranks)
        < bound + 2 * segments * ranks * item_bytes
    )


@pytest.mark.parametrize(
    ("items", "item_bytes", "ranks", "expected"),
    [(10, 4, 1, 0), (10, 4, 2, 40), (10, 4, 4, 60), (10, 4, 3, 56), (7, 8, 4, 88), (0, 4, 4, 0)],
)
def test_all_reduce_lower_bound(items: int, item_bytes: int, ranks: int, expected: int) -> None:
    assert all_reduce_lower_bound(items, item_bytes, ranks) == expected


def test_the_busiest_rank_is_the_one_with_the_busiest_direction() -> None:
    transfers = (Transfer(0, 1, 5), Transfer(1, 2, 7), Transfer(2, 1, 4))
    plan = Plan((Operation("send", "direct", 0, transfers, 0.0),))
    assert [plan.sent_bytes(rank) for rank in range(3)] == [5, 7, 4]
    assert [plan.received_bytes(rank) for rank in range(3)] == [0, 9, 7]
    assert plan.busiest_rank_bytes(3) == 9
    assert (plan + plan).busiest_rank_bytes(3) == 18
    assert (plan + Plan(())).operations == plan.operations


@pytest.mark.parametrize("model", ["cnn", "vgg11", "resnet18"])
@pytest.mark.parametrize("bucket_mb", [25.0, 10.0, 1.0, 0.3])
def test_buckets_are_those_that_torch_assigns(model: str, bucket_mb: float) -> None:
    gradients = gradients_of(MODELS[model]((3, 32, 32), 10))
    backwards = gradients[::-1]
    tensors = [torch.empty(g.items, device="meta") for g in backwards]
    limits = [MIB, 25 * MIB] if bucket_mb == 25.0 else [int(bucket_mb * MIB)]
    # With explicit indices the buckets stay in the order in which they fill, as when DDP rebuilds them.
    indices, _ = dist._compute_bucket_assignment_by_size(
        tensors, limits, [False] * len(tensors), list(range(len(tensors)))
    )
    buckets = classic.ddp_buckets(gradients, bucket_mb)
    assert [[g.name for g in bucket] for bucket in buckets] == [
        [backwards[i].name for i in bucket] for bucket in indices
    ]


def timed_gradients(model: nn.Module) -> list[Gradient]:
    """Return `gradients_of` with the times at which backward computes them, such as a weight before its bias."""
    order: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(order.append)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    ready_s = {id(parameter): float(position) for position, parameter in enumerate(order)}
    return [Gradient(name, p.numel(), p.element_size(), ready_s[id(p)]) for name, p in model.named_parameters()]


def bucket_bytes(comm: Comm, model: str, strategy: str) -> list[int]:
    """Return the sizes of the buckets that the `ddp` strategy sends after DDP has rebuilt them."""
    torch.manual_seed(0)
    ddp = create(strategy)
    module = ddp.attach(
        MODELS[model]((3, 32, 32), 10), lambda named: torch.optim.SGD([p for _, p in named], lr=0.0), comm
    )
    seen: list[int] = []

    def hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        state.append(bucket.buffer().nbytes)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    module.register_comm_hook(seen, hook)  # type: ignore[operator]
    for _ in range(2):
        seen.clear()
        module(torch.randn(2, 3, 32, 32)).sum().backward()
        ddp.step()
    ddp.close()
    return seen


@pytest.mark.parametrize(
    ("model", "strategy"), [("vgg11", "ddp"), ("resnet18", "ddp"), ("resnet18", "ddp:bucket_mb=10")]
)
def test_buckets_are_those_that_the_strategy_sends(pool: Pool, model: str, strategy: str) -> None:
    (sent,) = pool.run(bucket_bytes, 1, model, strategy)
    bucket_mb = float(strategy.partition("=")[2] or 25)
    buckets = classic.ddp_buckets(timed_gradients(MODELS[model]((3, 32, 32), 10)), bucket_mb)
    assert sent == [sum(g.bytes for g in bucket) for bucket in buckets]
    assert len(sent) > 1


def test_buckets_follow_the_order_of_backward() -> None:
    # 0.5 MiB each; "first" and "third" are ready before "last", the last parameter of the model.
    half = MIB // 8
    gradients = [
        Gradient("first", half, ready_s=0.1),
        Gradient("second", half, ready_s=0.4),
        Gradient("third", half, ready_s=0.2),
        Gradient("last", half, ready_s=0.3),
    ]
    names = [[g.name for g in bucket] for bucket in classic.ddp_buckets(gradients, 25.0)]
    assert names == [["first", "third"], ["last", "second"]]


def test_ddp_starts_a_bucket_when_its_last_gradient_is_ready() -> None:
    whole = MIB // 4
    gradients = [Gradient("a", whole, ready_s=3.0), Gradient("b", whole, ready_s=2.0), Gradient("c", 3, ready_s=1.0)]
    plan = classic.ddp(gradients, 4, bucket_mb=1)
    assert [operation.bytes for operation in plan.operations] == [MIB + 12, MIB]
    assert [operation.earliest_s for operation in plan.operations] == [2.0, 3.0]
    held = classic.ddp(gradients, 4, bucket_mb=1, overlap=False)
    assert [operation.bytes for operation in held.operations] == [MIB + 12, MIB]
    assert [operation.earliest_s for operation in held.operations] == [3.0, 3.0]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_operations_that_run_one_after_the_other_add_up_on_the_busiest_link(ranks: int) -> None:
    gradient = Gradient("a", 8 * 840)
    ring, through_0 = (plan([gradient], ranks) for plan in (classic.allreduce, classic.gather_scatter))
    assert ring.serial_link_bytes(ranks) == pytest.approx(2 * (ranks - 1) / ranks * gradient.bytes, rel=0.01)
    assert through_0.serial_link_bytes(ranks) == 2 * (ranks - 1) * gradient.bytes
    assert through_0.busiest_rank_bytes(ranks) == (ranks - 1) * gradient.bytes
    assert classic.nothing([gradient], ranks).serial_link_bytes(ranks) == 0
