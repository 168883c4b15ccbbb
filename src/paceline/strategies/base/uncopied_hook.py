"""Hook on the user's model that copies and files of the model do not contain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class UncopiedHook:
    """Function that is registered as a hook on a module of the user's model.

    Users copy a model while it is trained, to average its weights (`AveragedModel`), and save it as a whole. Hooks are
    copied with it. A copy must not synchronise anything, and process groups cannot be copied, so the copy of this hook
    does nothing.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that accepts any arguments and returns None. It is Python's own, so that a file of the model can be
        # loaded without Paceline.
        return getattr, (nullcontext, "__exit__")
