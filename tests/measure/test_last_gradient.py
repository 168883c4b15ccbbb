"""The last gradient of a backward pass is found with one hook per pass, also after the order of gradients changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.measure.last_gradient import PASSES_TO_LEARN, PASSES_UNTIL_RELEARNING, LastGradient


class Chain(nn.Module):
    """Four layers, used in order or in reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(4)])

    def forward(self, x: Tensor, reverse: bool = False) -> Tensor:
        """Apply all layers."""
        for layer in reversed(self.layers) if reverse else self.layers:
            x = layer(x)
        return x


class Order:
    """A `LastGradient` whose times are the number of gradients that are ready."""

    def __init__(self, model: Chain) -> None:
        self.count = 0
        self.model = model
        self.watch = LastGradient(model.parameters(), self.now)

    def now(self) -> int:
        self.count += 1
        return sum(layer.weight.grad is not None for layer in self.model.layers)

    def one_pass(self, *, reverse: bool = False) -> tuple[int | None, int]:
        """Return the number of gradients ready at the last recorded one, and the number of recorded ones."""
        self.count = 0
        self.model(torch.ones(1, 2), reverse).sum().backward()
        found = self.watch.take(), self.count
        self.model.zero_grad()
        return found


def test_all_are_watched_at_first_then_only_the_last() -> None:
    order = Order(Chain())
    assert [order.one_pass() for _ in range(PASSES_TO_LEARN)] == [(4, 4)] * PASSES_TO_LEARN
    assert [order.one_pass() for _ in range(20)] == [(4, 1)] * 20


def test_a_new_last_gradient_is_found_in_time() -> None:
    order = Order(Chain())
    for _ in range(PASSES_TO_LEARN):
        order.one_pass()
    wrong = 0
    while order.one_pass(reverse=True)[0] != 4:
        wrong += 1
    assert 0 < wrong <= PASSES_UNTIL_RELEARNING
    for _ in range(PASSES_TO_LEARN):
        order.one_pass(reverse=True)
    for reverse in (True, False, True):
        assert order.one_pass(reverse=reverse) == (4, 2), "both have been last"


def test_after_a_pass_without_gradients_all_are_watched() -> None:
    order = Order(Chain())
    assert order.watch.take() is None, "nothing was learnt"
    for _ in range(PASSES_TO_LEARN):
        order.one_pass()
    assert order.one_pass() == (4, 1)
    assert order.watch.take() is None
    assert order.one_pass(reverse=True) == (4, 4)


def test_close_removes_all_hooks() -> None:
    order = Order(Chain())
    order.watch.close()
    assert [order.one_pass() for _ in range(2)] == [(None, 0)] * 2
    assert not any(layer.weight._post_accumulate_grad_hooks for layer in order.model.layers)
