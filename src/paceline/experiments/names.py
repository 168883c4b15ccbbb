"""Checks the names in a configuration, and gets its data, without importing torch: the quickest answers first."""

from __future__ import annotations

import traceback
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import UsageError, WorkloadError, unknown_name
from paceline.specs import Spec
from paceline.strategies import registry
from paceline.workloads import data
from paceline.workloads.names import MODEL_NAMES, find_own_module, is_own


def check_names(config: RunConfig) -> None:
    """Refuses an unknown workload or strategy, with the nearest known name."""
    if is_own(config.workload):
        check_module(config.workload.partition(":")[0])
    elif config.workload not in MODEL_NAMES:
        raise unknown_name("workload", config.workload, [*MODEL_NAMES, "my_module:make_workload"])
    name = Spec.parse(config.strategy).name
    if ":" in name:
        check_module(name.partition(":")[0])
    else:
        registry.find(name)


def check_module(name: str) -> None:
    """Refuses a module of the user's that is not there, without running it."""
    if "/" in name or name.endswith(".py") or not name:
        raise UsageError(
            f"{name!r} is not the name of a module.", hint=f"write it as python imports it: {Path(name).stem}:NAME"
        )
    try:
        found = find_own_module(name)
    except (ImportError, ValueError):  # ValueError: __main__ and its like.
        found = False
    except Exception as error:  # A package that fails: to find a module in it, it has to be imported.
        detail = traceback.format_exc().rstrip()
        raise WorkloadError(f"importing {name!r} failed: {type(error).__name__}: {error}", detail=detail) from None
    if not found:
        raise UsageError(f"there is no module {name!r} in {Path.cwd()}.", hint="run from the folder it is in")


def prepare_data(config: RunConfig) -> None:
    """Makes sure that the data set is there and intact: once, in one process, before any rank starts."""
    if not is_own(config.workload):
        data.prepare(config.data, data_dir=data.data_dir(config.data_dir), svhn_extra=config.svhn_extra)
