"""Keep torch from importing its compiler in runs that compile nothing: 800 modules, which take from 0.8 s to several.

The compiler must not trace some functions of torch, such as `Optimizer.zero_grad`. Their first call imports it, to have
it exclude them, even if nothing is ever compiled. Where it is not imported, `exclude_from_compiler` sets the mark that
torch looks for (`torch/_compile.py`) itself. A version of torch that does not know the mark imports the compiler.

Optimisers of torch import it in `step`, except those of a recipe (`optimizers/of_torch.py`). It is then imported before
the first step, which is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch.optim import Optimizer

from paceline.training.optimizers.of_torch import SGD, AdamW

COMPILER = "torch._dynamo"
OPTIMIZER_FUNCTIONS = (
    Optimizer.add_param_group,
    Optimizer.zero_grad,
    Optimizer.state_dict,
    Optimizer.load_state_dict,
)
"""Functions of optimisers that the compiler excludes."""
_MARK = "__dynamo_disable"


def exclude_from_compiler(*functions: Callable[..., Any]) -> None:
    """Let functions that the compiler must not trace run without importing it, until something else imports it."""
    if COMPILER in sys.modules:
        return
    for function in functions:
        excluded = getattr(function, "__wrapped__", None)
        if excluded is not None and not hasattr(excluded, _MARK):
            setattr(excluded, _MARK, _Excluded(function, excluded))


def import_compiler_if_used(optimizer: Optimizer) -> None:
    """Import the compiler before training if a step of the optimiser would import it, as those of torch's do."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim.")]
    if kinds != [Optimizer] and not isinstance(optimizer, SGD | AdamW):
        import_module(COMPILER)


class _Excluded:
    """Excluded function, called as it is. Once the compiler is imported, torch excludes it as usual."""

    def __init__(self, function: Callable[..., Any], excluded: Callable[..., Any]) -> None:
        self._function, self._excluded = function, excluded

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if COMPILER not in sys.modules:
            return self._excluded(*arguments, **named)
        if getattr(self._excluded, _MARK, None) is self:
            delattr(self._excluded, _MARK)
        return self._function(*arguments, **named)
