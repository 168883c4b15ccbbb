"""Record when the last gradient of a backward pass is ready: compute ends there; the rest of the pass is waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

PASSES_TO_LEARN = 3
"""Backward passes in which all parameters are watched."""
PASSES_UNTIL_RELEARNING = 100
"""Backward passes after which all parameters are watched again."""


class LastGradient:
    """Time of the last gradient, from hooks on parameters that run before DDP's.

    A hook on each parameter would slow down a small model's step by 1%. Usually the same parameter is last in every
    pass. So all parameters are watched for a few passes, then only those that were last in one, and later all again.
    """

    def __init__(self, parameters: Iterable[Tensor], now: Callable[[], Any]) -> None:
        self._parameters = list(parameters)
        self._now = now
        self._hooks: dict[int, RemovableHandle] = {}
        self._last_numbers: set[int] = set()
        self._passes_left = 0
        self._learning = False
        self._number = 0
        self._time: Any = None
        self._watch_all()

    def take(self) -> Any:
        """Return, after a backward pass, the `now()` of its last gradient; None if none was seen."""
        time, self._time = self._time, None
        if time is not None and self._learning:
            self._last_numbers.add(self._number)
        self._passes_left -= 1
        if self._learning and self._passes_left <= 0:
            self._watch_last_ones()
        elif not self._learning and (time is None or self._passes_left <= 0):
            self._watch_all()
        return time

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._parameters = {}, []

    def _watch_all(self) -> None:
        self._learning, self._passes_left = True, PASSES_TO_LEARN
        for number, parameter in enumerate(self._parameters):
            if number not in self._hooks:
                self._hooks[number] = parameter.register_post_accumulate_grad_hook(self._hook(number))

    def _watch_last_ones(self) -> None:
        if not self._last_numbers:  # No gradient was seen: the passes may have reached no parameter.
            self._passes_left = PASSES_TO_LEARN
            return
        self._learning, self._passes_left = False, PASSES_UNTIL_RELEARNING
        for number in self._hooks.keys() - self._last_numbers:
            self._hooks.pop(number).remove()

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def record(_: Tensor) -> None:
            self._time, self._number = self._now(), number

        return record
