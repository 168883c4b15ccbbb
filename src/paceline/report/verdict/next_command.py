"""Next command of a comparison: train with what it recommends, or measure what it leaves open.

The command repeats only settings that belong to training (`in_next_command` of a setting), and never turns the length
of the measured runs into a length of training: the user's `--epochs` are repeated, and without them the default holds.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.analysis.caveats import slowed_on_purpose
from paceline.analysis.comparison import Comparison
from paceline.analysis.exclusions import diverged
from paceline.config import DEFAULT_STRATEGY, LENGTH_SETTINGS, RunConfig
from paceline.config.setting import select
from paceline.records.experiment.design import Candidate, Design

OMITTED_SETTINGS = frozenset(select(RunConfig, lambda metadata: metadata.positional or not metadata.in_next_command))
"""Settings left out of a suggested command: it names the workload elsewhere, and the others are about measuring."""


def next_command(comparison: Comparison) -> str | None:
    """Return the command to run next; None where there is no good advice."""
    if (
        comparison.decision.first is None or len(comparison.record_set.designs) != 1
    ):  # No single experiment to continue.
        return None
    if comparison.pick is None and not comparison.computes_same:
        return _compare_with_default(comparison)
    learning = comparison.learning
    if learning is not None and learning.is_clear:
        return _train(comparison, comparison.row(learning.best).candidate)
    if comparison.pick is None and comparison.decision.outcome == "undecided":
        return _compare_longer(comparison)
    if comparison.gain_in_doubt:  # It is not known whether to distribute at all.
        return None
    return _train(comparison, comparison.row(comparison.pick or comparison.decision.first).candidate)


def _train(comparison: Comparison, winner: Candidate) -> str | None:
    """Return the command that trains with the winner; None where its loss was not finite in a repeat."""
    record_set, design = comparison.record_set, comparison.record_set.designs[0]
    if diverged(record_set, winner.name):
        return None
    if "script" in record_set.config:
        alone = winner.role == "baseline"
        start = ["python"] if alone else ["torchrun", "--nproc-per-node", str(design.ranks)]
        command = shlex.join([*start, record_set.config["script"], *record_set.config["args"]])
        return f'{command}  # with paceline.attach(model, make_optimizer, "{winner.strategy}")'
    config = dict(record_set.config) | winner.settings
    hosts = _ranks(design) | {"ranks": 1} if winner.role == "baseline" else _training_hosts(design)
    return _command("train", config, {"strategy": winner.strategy, **hosts})


def train_command(config: Mapping[str, Any], design: Design, settings: Mapping[str, Any]) -> str:
    """Return the command that trains with some settings on the ranks of a design."""
    return _command("train", dict(config), {**_training_hosts(design), **settings})


def _compare_longer(comparison: Comparison) -> str | None:
    """Return the command that measures the two fastest for longer; None if ranks were slowed down on purpose.

    A slow rank is a condition of the measurement, which no command repeats; without it the question is another one.
    """
    record_set, design = comparison.record_set, comparison.record_set.designs[0]
    fastest = [comparison.row(name).candidate for name in _fastest_two(comparison)]
    runs = [run for candidate in fastest for run in record_set.runs_of(candidate.name).values()]
    if any(map(slowed_on_purpose, runs)):
        return None
    apart = fastest[0].settings != fastest[-1].settings  # Then `--vary` runs every strategy under every setting.
    strategies = [candidate.strategy for candidate in fastest]
    names = ",".join(dict.fromkeys(strategies) if apart else strategies)
    extra = {"strategies": names, **_longer_run(record_set.config), **_measured_hosts(design)}
    extra["max_repeats"] = 2 * design.max_repeats
    return _command("compare", dict(record_set.config), extra, _vary_options(comparison))


def _compare_with_default(comparison: Comparison) -> str:
    """Return the command that compares the fastest candidate with a strategy that computes the same."""
    record_set, design = comparison.record_set, comparison.record_set.designs[0]
    assert comparison.decision.first is not None
    fastest = comparison.row(comparison.decision.first).candidate
    config = dict(record_set.config) | fastest.settings
    extra = {"strategies": f"{DEFAULT_STRATEGY},{fastest.strategy}", **_length(record_set.config)}
    return _command("compare", config, extra | _measured_hosts(design))


def _measured_hosts(design: Design) -> dict[str, Any]:
    """Return the options that start the same ranks on the same hosts, for another measurement."""
    if design.emulated:
        return _ranks(design) | {"emulate": design.emulated, "host_cpus": design.host_cpus}
    return _training_hosts(design)


def _training_hosts(design: Design) -> dict[str, Any]:
    """Return the options that start the same ranks for training: real hosts in place of emulated ones.

    Real hosts each need their own `--node-rank`.
    """
    if design.hosts > 1:
        return _ranks(design) | {"hosts": design.hosts, "node_rank": "R", "master": "ADDRESS:PORT"}
    return _ranks(design)


def _ranks(design: Design) -> dict[str, Any]:
    return {"ranks": design.ranks, "threads": design.requested_threads}


def _length(config: dict[str, Any]) -> dict[str, float]:
    """Return the length of the measured runs, as far as it is not one of training, which every command repeats."""
    return {key: config[key] for key in LENGTH_SETTINGS if key in OMITTED_SETTINGS and config.get(key)}


def _longer_run(config: dict[str, Any]) -> dict[str, float]:
    """Return the setting of a longer run, whose result is more certain."""
    if config.get("steps"):
        return {"steps": 4 * config["steps"]}
    if config.get("seconds") and not config.get("epochs"):
        return {"seconds": 2 * config["seconds"]}
    return {"epochs": 2 * (config.get("epochs") or 1)}


def _fastest_two(comparison: Comparison) -> list[str]:
    return [name for name in (comparison.decision.first, comparison.decision.second) if name is not None]


def _vary_options(comparison: Comparison) -> list[str]:
    """Return the `--vary` options that reproduce the settings of the two fastest candidates."""
    fastest = [comparison.row(name).candidate.settings for name in _fastest_two(comparison)]
    keys = [key for key in fastest[0] if all(key in settings for settings in fastest)]
    return [f"{key}={','.join(dict.fromkeys(_format_option(s[key]) for s in fastest))}" for key in keys]


def _format_option(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _command(verb: str, config: dict[str, Any], extra: dict[str, Any], vary: Sequence[str] = ()) -> str:
    """Return a command line with the settings that differ from the defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    words = ["paceline", verb]
    if "script" in config:
        words += ["--script", config["script"]]
    elif config.get("workload", defaults["workload"]) != defaults["workload"]:
        words.append(config["workload"])
    settings = {k: v for k, v in config.items() if k not in OMITTED_SETTINGS and k in defaults and v != defaults[k]}
    for key, value in (settings | extra).items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", str(value)]
    words += [word for setting in vary for word in ("--vary", setting)]
    return shlex.join([*words, *(["--", *config["args"]] if config.get("args") else [])])
