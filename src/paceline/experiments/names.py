"""Check names in a configuration and fetch its data, without importing torch, so that mistakes show at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.config import CompareConfig, RunConfig
from paceline.config.specs import Spec, split_list
from paceline.errors import UsageError, unknown_name
from paceline.strategies import registry
from paceline.user_code import check_module
from paceline.workloads import data
from paceline.workloads.given_settings import check_built_in, check_recipe
from paceline.workloads.names import MODEL_NAMES, is_user_workload
from paceline.workloads.recipes import choose_recipe


def check_names(config: RunConfig) -> None:
    """Raise for an unknown workload, strategy or recipe, and for settings that have no effect on a built-in workload.

    The error suggests the nearest known name.
    """
    if is_user_workload(config.workload):
        check_module(config.workload.partition(":")[0])
    elif config.workload not in MODEL_NAMES:
        raise unknown_name("workload", config.workload, [*MODEL_NAMES, "my_module:make_workload"])
    name = Spec.parse(config.strategy).name
    if ":" in name:
        check_module(name.partition(":")[0])
    else:
        registry.find(name)
    choose_recipe(config)
    if not is_user_workload(config.workload):  # Of a user's workload, its own recipe is known once it is loaded.
        check_recipe(config)
        check_built_in(config)


def prepare_data(config: RunConfig) -> None:
    """Make sure that the data set exists and is intact: once, in one process, before any rank starts."""
    if not is_user_workload(config.workload):
        data.prepare(config.data, data_dir=data.data_dir(config.data_dir))


def check_all_names(configs: Sequence[object]) -> None:
    """Raise for unknown names in the configs of a command: workload, data, strategies and their options."""
    run, compare = _parts(configs)
    if compare is not None and compare.script:
        if not Path(compare.script).is_file():
            raise UsageError(f"there is no script {compare.script}.", hint="--script takes the path of a Python file")
        return
    if run is None:
        return
    if not is_user_workload(run.workload):
        data.check(run.data)
    texts = [text for config in configs if (text := getattr(config, "strategies", ""))]
    for strategy in registry.parse_list(",".join(texts)) if texts else [run.strategy]:
        check_names(replace(run, strategy=strategy))
        registry.check_options(strategy)


def prepare_all_data(configs: Sequence[object]) -> None:
    """Make sure that all data sets of a command exist, those in --vary included."""
    run, compare = _parts(configs)
    if run is None or (compare is not None and compare.script):
        return
    varied = dict(compare.varied) if compare else {}
    for name in split_list(varied["data"]) if "data" in varied else [run.data]:
        prepare_data(replace(run, data=name))


def _parts(configs: Sequence[object]) -> tuple[RunConfig | None, CompareConfig | None]:
    run = next((config for config in configs if isinstance(config, RunConfig)), None)
    return run, next((config for config in configs if isinstance(config, CompareConfig)), None)
