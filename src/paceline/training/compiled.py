"""Compiling a model with torch.compile (`--compile`): in place, before the first step, for the batches of the run.

The module and the names of its parameters stay as they are, so checkpoints, `--save` and the parity proof are those of
the model without it. Compiled code is used for the micro-batches of the first step. Others, such as the last
batch of an epoch, and evaluation would each need a compilation of their own, so they run without. CUDA graphs are those
of Paceline (`training/graphs/`), never those of the compiler.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.comm.messages.nested_tensors import tensors_in
from paceline.config import RunConfig
from paceline.errors import UsageError, WorkloadError
from paceline.measure.activity import ACTIVITY
from paceline.training.dry_pass import dry_pass
from paceline.training.sync import Sync
from paceline.workloads.batches import Source
from paceline.workloads.workload import Workload

BACKEND = "inductor"
"""Back end of torch.compile. Tests replace it by one that compiles faster."""
HINT = "leave out --compile"


def check_can_compile(device_type: str) -> None:
    """Raise if the tools that the compiler needs on a device are missing."""
    if BACKEND != "inductor":
        return
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UsageError(
                "--compile was given, but Triton, which compiles for GPUs, is not installed or does not know this GPU.",
                hint=f"install triton, or {HINT}",
            )
    elif not any(shutil.which(name) for name in [os.environ.get("CXX"), "g++", "clang++"] if name):
        raise UsageError(
            "--compile was given, but there is no C++ compiler, which it needs on CPUs.",
            hint=f"install g++, or {HINT}",
        )


def compile_in_place(model: nn.Module) -> None:
    """Have a model compiled at its first call. It must not be attached to a strategy yet, which may look at it."""
    # Ranks train several runs. Code of the models before is useless, and counts towards the limit of recompilations.
    torch.compiler.reset()

    def call(*arguments: Any, **named: Any) -> Any:
        return model._call_impl(*arguments, **named)

    # As `model.compile` does, which would not compile a model whose class is torch's own, such as `nn.Sequential`.
    model._compiled_call_impl = torch.compile(call, backend=BACKEND, dynamic=False)


def without_compiled_code() -> AbstractContextManager[Any]:
    """Return a context in which compiled models run as if they were not compiled."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class CompiledForms:
    """Forms of micro-batches for which there is compiled code: those of the first step."""

    def __init__(self) -> None:
        self._forms: set[Hashable] = set()
        self._is_complete = False

    def context(self, batch: Any) -> AbstractContextManager[Any]:
        """Return the context for the forward pass of a micro-batch."""
        form = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(batch))
        if form in self._forms:
            return nullcontext()
        if self._is_complete:
            return without_compiled_code()
        self._forms.add(form)
        return nullcontext()

    def end_step(self) -> None:
        """Accept no further forms."""
        self._is_complete = True


def compile_now(
    config: RunConfig, workload: Workload, sync: Sync, source: Source, forms: CompiledForms
) -> float | None:
    """Compile forward and backward by a pass that changes nothing; return the seconds it took.

    None if there can be no such pass. The first step compiles then. Called on all ranks.
    """
    started_s = time.perf_counter()
    with ACTIVITY.doing("compiling the model"), explaining_failures():
        is_done = dry_pass(config, workload, sync, source, forms)
    return time.perf_counter() - started_s if is_done else None


@contextmanager
def explaining_failures() -> Iterator[None]:
    """Turn an error of the compiler inside the `with` block into a `WorkloadError`."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        if reason.endswith(":") and len(lines) > 1:  # "backend='inductor' raised:", and then the error.
            reason = f"{reason} {lines[1]}"
        raise WorkloadError(f"the model cannot be compiled: {reason}", hint=HINT) from error
