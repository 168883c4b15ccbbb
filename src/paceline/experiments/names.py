"""Checks the names in a configuration, and gets its data, without importing torch: the quickest answers first."""

from __future__ import annotations

from paceline.config import RunConfig
from paceline.errors import unknown_name
from paceline.own import check_module
from paceline.specs import Spec
from paceline.strategies import registry
from paceline.workloads import data
from paceline.workloads.names import MODEL_NAMES, is_own


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


def prepare_data(config: RunConfig) -> None:
    """Makes sure that the data set is there and intact: once, in one process, before any rank starts."""
    if not is_own(config.workload):
        data.prepare(config.data, data_dir=data.data_dir(config.data_dir), svhn_extra=config.svhn_extra)
