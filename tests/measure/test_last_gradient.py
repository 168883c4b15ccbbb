"""The last gradient of a backward pass: found with one hook a pass, and found again when the model changes its mind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.measure.last_gradient import PASSES_TO_LEARN, PASSES_UNTIL_DOUBT, LastGradient


class Chain(nn.Module):
    """Two layers, used in the one order or in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(4)])

    def forward(self, x: Tensor, turned: bool = False) -> Tensor:
        """Through all layers."""
        for layer in reversed(self.layers) if turned else self.layers:
            x = layer(x)
        return x


class Order:
    """The numbers of the layers whose gradients were seen, as moments."""

    def __init__(self, model: Chain) -> None:
        self.count = 0
        self.model = model
        self.watch = LastGradient(model.parameters(), self.now)

    def now(self) -> int:
        self.count += 1
        return sum(layer.weight.grad is not None for layer in self.model.layers)

    def one_pass(self, *, turned: bool = False) -> tuple[int | None, int]:
        """How many gradients were there when the last was noted, and how many were noted."""
        self.count = 0
        self.model(torch.ones(1, 2), turned).sum().backward()
        found = self.watch.take(), self.count
        self.model.zero_grad()
        return found


def test_all_are_watched_at_first_then_only_the_last() -> None:
    order = Order(Chain())
    assert [order.one_pass() for _ in range(PASSES_TO_LEARN)] == [(4, 4)] * PASSES_TO_LEARN
    assert [order.one_pass() for _ in range(20)] == [(4, 1)] * 20


def test_another_last_one_is_found_in_time() -> None:
    order = Order(Chain())
    for _ in range(PASSES_TO_LEARN):
        order.one_pass()
    wrong = 0
    while order.one_pass(turned=True)[0] != 4:
        wrong += 1
    assert 0 < wrong <= PASSES_UNTIL_DOUBT
    for _ in range(PASSES_TO_LEARN):
        order.one_pass(turned=True)
    for turned in (True, False, True):
        assert order.one_pass(turned=turned) == (4, 2), "both have come last"


def test_a_pass_without_any_makes_it_look_at_once() -> None:
    order = Order(Chain())
    assert order.watch.take() is None, "nothing was learnt"
    for _ in range(PASSES_TO_LEARN):
        order.one_pass()
    assert order.one_pass() == (4, 1)
    assert order.watch.take() is None
    assert order.one_pass(turned=True) == (4, 4)


def test_when_closed_it_leaves_nothing() -> None:
    order = Order(Chain())
    order.watch.close()
    assert [order.one_pass() for _ in range(2)] == [(None, 0)] * 2
    assert not any(layer.weight._post_accumulate_grad_hooks for layer in order.model.layers)
