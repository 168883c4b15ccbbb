"""Hooks by which servers follow `load_state_dict` and `state_dict` of model and optimiser in a user's loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from paceline.strategies.base.uncopied_hook import UncopiedHook
from paceline.strategies.parameter_server.worker import Worker


class LoadHooks:
    """Hooks of a worker on its model and its optimiser, until `remove`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker) -> None:
        self._is_paused = False
        self._hooks = ExitStack()
        self._worker = worker
        for hook in (
            model.register_load_state_dict_post_hook(UncopiedHook(self._on_model_load)),
            optimizer.register_load_state_dict_post_hook(lambda _: worker.on_optimizer_load()),
            optimizer.register_state_dict_post_hook(lambda _, found: worker.complete_state_dict(found)),
        ):
            self._hooks.callback(hook.remove)

    def _on_model_load(self, *_: object) -> None:
        if not self._is_paused:
            self._worker.on_model_load()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let a load have no consequence in the `with` block: the strategy itself carries it to the servers."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def remove(self) -> None:
        """Remove the hooks."""
        self._hooks.close()
