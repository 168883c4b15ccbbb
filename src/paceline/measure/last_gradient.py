"""Notes when the last gradient of a backward pass is there: computing ends then, what waits comes after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

PASSES_TO_LEARN = 3
PASSES_UNTIL_DOUBT = 100


class LastGradient:
    """Watches parameters through hooks that run before DDP's.

    A hook on each of them would cost a small model's step a percent. As a rule the same parameter is the last in every
    pass; so all are watched in a few passes, then only those that came last in one, and now and then all again.
    """

    def __init__(self, parameters: Iterable[Tensor], now: Callable[[], Any]) -> None:
        self._parameters = list(parameters)
        self._now = now
        self._hooks: dict[int, RemovableHandle] = {}
        self._came_last: set[int] = set()
        self._passes_left = 0
        self._learning = False
        self._number = 0
        self._moment: Any = None
        self._watch_all()

    def take(self) -> Any:
        """At the end of a backward pass: what `now` gave when its last gradient was there; None if none was seen."""
        moment, self._moment = self._moment, None
        if moment is not None and self._learning:
            self._came_last.add(self._number)
        self._passes_left -= 1
        if self._learning and self._passes_left <= 0:
            self._watch_those_that_came_last()
        elif not self._learning and (moment is None or self._passes_left <= 0):
            self._watch_all()
        return moment

    def close(self) -> None:
        """Watches no longer."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._parameters = {}, []

    def _watch_all(self) -> None:
        self._learning, self._passes_left = True, PASSES_TO_LEARN
        for number, parameter in enumerate(self._parameters):
            if number not in self._hooks:
                self._hooks[number] = parameter.register_post_accumulate_grad_hook(self._hook(number))

    def _watch_those_that_came_last(self) -> None:
        if not self._came_last:  # Nothing was learnt: there may have been passes that reached no parameter.
            self._passes_left = PASSES_TO_LEARN
            return
        self._learning, self._passes_left = False, PASSES_UNTIL_DOUBT
        for number in self._hooks.keys() - self._came_last:
            self._hooks.pop(number).remove()

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def is_there(_: Tensor) -> None:
            self._moment, self._number = self._now(), number

        return is_there
