"""The target of an experiment: a workload in Paceline's own loop, or a user's script.

The same ranks train a workload under all candidates, one after the other. A script owns its process, so each of its
runs needs a launch, and its parity proof compares it with another run of the same script.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from paceline.config import ATTACH_SETTINGS, SCRIPT_SETTINGS, VARIED_IN_SCRIPTS, CompareConfig, RunConfig, Script
from paceline.config.setting import option_name
from paceline.errors import UsageError
from paceline.experiments.candidates import WORKLOAD_RULES, CandidateConfig, CandidateRules, shared_settings
from paceline.experiments.estimate import Trials, run_trials
from paceline.experiments.names import prepare_data
from paceline.formatting import scientific
from paceline.launch.job import Task
from paceline.launch.launcher_process import Shape
from paceline.records.decoder import read_model
from paceline.records.parity import Parity
from paceline.records.schema import PARITY_FILE
from paceline.records.settings import Settings
from paceline.strategies.base.strategy import Role, Strategy
from paceline.strategies.registry import create
from paceline.workloads import data
from paceline.workloads.names import is_user_workload

GRADIENTS_FILE = "gradients.pt"


@dataclass(frozen=True)
class ScheduledRun:
    """One run of an experiment: the candidate's name, its config, and the folder of the run."""

    name: str
    candidate_config: CandidateConfig
    folder: Path


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """Figures of a target for the design of an experiment; None where unknown."""

    target: str
    """Name of the workload, or the command line of the script."""
    batch: int | None
    """Global batch, at most all of the data."""
    trials: Trials = field(default_factory=dict)
    """Trial of the workload of each candidate; empty if there is none."""


class Unproven(Exception):
    """Raised with the reason why strategies can be measured but not proven."""


class RankLauncher(Protocol):
    """Starts ranks for a target's parity proof; the engine."""

    def launch(self, task: Task, stage: str, folder: Path, runs: Sequence[ScheduledRun], oracle: str = "") -> None:
        """Start ranks that carry out these runs one after the other; raise if one fails."""

    def run_in_order(self, task: Task, stage: str, runs: Sequence[ScheduledRun], oracle: str = "") -> None:
        """Start ranks for all runs; a candidate that fails is left out from now on."""


class TrainingTarget(Protocol):
    """The workload or script that an experiment trains."""

    @property
    def rules(self) -> CandidateRules:
        """Rules on what may vary between candidates."""

    @property
    def script(self) -> Script | None:
        """User's script, if it is one."""

    def settings(self, candidate_configs: Sequence[CandidateConfig]) -> Settings:
        """Return the settings that all candidates share, for the record."""

    def prepare(self, candidate_configs: Sequence[CandidateConfig]) -> None:
        """Fetch the data; called on every host."""

    def describe(self, candidate_configs: Sequence[CandidateConfig], ranks: int) -> TargetInfo:
        """Return its name, its global batch and trials of it; raise if it cannot be trained."""

    def script_of(self, run: ScheduledRun) -> Script | None:
        """Return the script that the ranks of a run execute in place of our own loop."""

    def shape_of(self, run: ScheduledRun) -> Shape:
        """Return the number of hosts and processes of a run."""

    def together(self, runs: Sequence[ScheduledRun]) -> list[tuple[Path, list[ScheduledRun]]]:
        """Group runs into launches; return the folder and the runs of each.

        Runs in sibling folders have the same shape.
        """

    def prove(self, runs: Sequence[ScheduledRun], launcher: RankLauncher) -> None:
        """Write the parity of each run into its folder; raise `Unproven` if it cannot be proven."""


class WorkloadTarget:
    """A built-in workload or a user's, trained in our own loop."""

    rules: CandidateRules = WORKLOAD_RULES
    script: Script | None = None

    def settings(self, candidate_configs: Sequence[CandidateConfig]) -> Settings:
        return shared_settings(dataclasses.asdict(candidate_configs[0].config), candidate_configs)

    def prepare(self, candidate_configs: Sequence[CandidateConfig]) -> None:
        for candidate_config in candidate_configs:
            prepare_data(candidate_config.config)

    def describe(self, candidate_configs: Sequence[CandidateConfig], ranks: int) -> TargetInfo:
        config = candidate_configs[0].config
        trials = run_trials(candidate_configs)
        batches = {_batch_of(one, ranks, trials) for one in candidate_configs}
        return TargetInfo(
            target=config.workload if is_user_workload(config.workload) else f"{config.workload} on {config.data}",
            batch=batches.pop() if len(batches) == 1 else None,
            trials=trials,
        )

    def script_of(self, run: ScheduledRun) -> Script | None:  # noqa: ARG002
        return None

    def shape_of(self, run: ScheduledRun) -> Shape:
        return run.candidate_config.shape

    def together(self, runs: Sequence[ScheduledRun]) -> list[tuple[Path, list[ScheduledRun]]]:
        return [(folder, list(group)) for folder, group in itertools.groupby(runs, key=lambda run: run.folder.parent)]

    def prove(self, runs: Sequence[ScheduledRun], launcher: RankLauncher) -> None:
        launcher.run_in_order("prove", "proof", runs)


class ScriptRules:
    """Rules for scripts: what may vary between runs, and which strategies `attach` supports."""

    fixed: Mapping[str, str] = {
        field.name: f"set it in the script's arguments, after `--`; scripts can vary {' or '.join(VARIED_IN_SCRIPTS)}"
        for field in dataclasses.fields(RunConfig)
        if field.name not in VARIED_IN_SCRIPTS
    } | {"strategy": WORKLOAD_RULES.fixed["strategy"]}

    def check_names(self, config: RunConfig) -> None:
        """Do nothing: names of strategies are checked when they are created."""

    def check_fit(self, config: RunConfig, strategy: Strategy, ranks: int) -> None:
        if Role.SERVER in strategy.roles(ranks):
            raise UsageError(
                f"{strategy.name} needs ranks that only serve, and a script trains on every rank.",
                hint="leave it out of --strategies",
            )
        if not strategy.lockstep:
            raise UsageError(
                f"{config.strategy} hands out the data in tickets, and a script divides its data itself.",
                hint="leave it out of --strategies, or compare it on a workload, my_module:make_workload",
            )


SCRIPT_RULES = ScriptRules()


@dataclass(frozen=True)
class ScriptTarget:
    """A script that calls `paceline.attach`."""

    script: Script
    rules: CandidateRules = SCRIPT_RULES

    def settings(self, candidate_configs: Sequence[CandidateConfig]) -> Settings:
        return shared_settings(self.script.settings_to_keep(candidate_configs[0].config), candidate_configs)

    def prepare(self, candidate_configs: Sequence[CandidateConfig]) -> None:
        """Do nothing: a script fetches its data itself."""

    def describe(self, candidate_configs: Sequence[CandidateConfig], ranks: int) -> TargetInfo:
        del candidate_configs, ranks
        return TargetInfo(target=shlex.join([self.script.path, *self.script.args]), batch=None)

    def script_of(self, run: ScheduledRun) -> Script | None:
        named = {*self.script.settings, *run.candidate_config.candidate.settings}
        return replace(self.script, settings=tuple(sorted(named)))

    def shape_of(self, run: ScheduledRun) -> Shape:
        """Return the shape without idle ranks: a script has none."""
        shape = run.candidate_config.shape
        active = sum(role is not Role.IDLE for role in create(run.candidate_config.config.strategy).roles(shape.ranks))
        return shape if active == shape.ranks else Shape(1, active)

    def together(self, runs: Sequence[ScheduledRun]) -> list[tuple[Path, list[ScheduledRun]]]:
        return [(run.folder, [run]) for run in runs]

    def prove(self, runs: Sequence[ScheduledRun], launcher: RankLauncher) -> None:
        """Prove candidates only: the baseline trains on another batch, and the bound does not synchronise."""
        eligible = [run for run in runs if run.candidate_config.candidate.role == "candidate"]
        for number, group in enumerate(_by_settings(eligible), start=1):
            folder = group[0].folder.with_name(f"oracle-{number}")
            gradients = folder / GRADIENTS_FILE
            try:
                launcher.launch(
                    "oracle",
                    "proof",
                    folder,
                    [ScheduledRun("oracle", group[0].candidate_config, folder)],
                    str(gradients),
                )
                launcher.run_in_order("prove", "proof", group, str(gradients))
                if not all(_is_proven(run) for run in group):
                    self._prove_oracle(group[0], folder.with_name(f"{folder.name}-again"), launcher, gradients)
            finally:
                gradients.unlink(missing_ok=True)  # As large as the model, and no longer needed.

    def _prove_oracle(self, run: ScheduledRun, folder: Path, launcher: RankLauncher, gradients: Path) -> None:
        """Run the oracle again; raise `Unproven` if the two differ, since then no strategy is at fault."""
        launcher.launch(
            "prove_oracle",
            "proof",
            folder,
            [ScheduledRun("oracle", run.candidate_config, folder)],
            str(gradients),
        )
        found = read_parity(folder)
        if found is not None and math.isinf(found.relative_error):
            raise Unproven(
                f"{self.script.name} has gradients that are not finite, or different ones each time, so parity cannot "
                "be proven: debug it on one rank."
            )
        if found is not None and not found.holds:
            raise Unproven(
                f"{self.script.name} computes different gradients in two runs (they differ by "
                f"{scientific(found.relative_error)} of the norm), so parity cannot be proven: "
                "seed everything random in it."
            )


def _batch_of(one: CandidateConfig, ranks: int, trials: Trials) -> int | None:
    """Return the global batch of a candidate, at most all of the data; None if it is unknown before the run."""
    trial = trials.get(one.candidate.name)
    if trial is not None:
        return trial.batch_of(one.config, ranks)
    wanted = one.config.global_batch(ranks)
    if one.config.batch is not None or one.config.batch_per_rank is not None:
        return wanted
    if is_user_workload(one.config.workload):
        return None
    train, _ = data.load(one.config.data, data_dir=data.data_dir(one.config.data_dir))
    return min(wanted, len(train.images))


def choose_target(base: RunConfig, config: CompareConfig, args: Sequence[str]) -> tuple[TrainingTarget, RunConfig]:
    """Return what to train and the config that its runs share; raise for options that contradict each other."""
    if config.script:
        target = _script_target(base, config.script, args)
        return target, replace(base, workload=target.script.name)
    if args:
        raise UsageError(
            f"{shlex.join(args)} was given after `--`, but there is no --script.", hint="leave it out, or add --script"
        )
    return WorkloadTarget(), base


def read_parity(folder: Path) -> Parity | None:
    """Return the result of a parity proof; None if it did not finish."""
    if not (folder / PARITY_FILE).is_file():
        return None
    return read_model(folder / PARITY_FILE, Parity, "parity")


def _script_target(base: RunConfig, path: str, args: Sequence[str]) -> ScriptTarget:
    if not Path(path).is_file():
        raise UsageError(f"there is no script {path} in {Path.cwd()}.", hint="--script takes the path of a Python file")
    name = Path(path).name
    changed = [field.name for field in dataclasses.fields(base) if getattr(base, field.name) != field.default]
    for setting in changed:
        if setting not in SCRIPT_SETTINGS:
            own = f"{name} sets it itself; put its arguments after `--`"
            hint = "give --steps in its place" if setting == "epochs" else own
            raise UsageError(f"{option_name(RunConfig, setting)} was given together with --script.", hint=hint)
    return ScriptTarget(Script(path=path, args=tuple(args), settings=tuple(s for s in ATTACH_SETTINGS if s in changed)))


def _is_proven(run: ScheduledRun) -> bool:
    """Whether a run passed its proof; a run that failed or is not lossless does not count against the script."""
    parity = read_parity(run.folder)
    return parity is None or parity.holds or not run.candidate_config.candidate.lossless


def _by_settings(runs: Sequence[ScheduledRun]) -> Iterable[list[ScheduledRun]]:
    """Group runs by settings: runs with the same settings share an oracle."""

    def settings(run: ScheduledRun) -> str:
        return str(sorted(run.candidate_config.candidate.settings.items()))

    return [list(group) for _, group in itertools.groupby(sorted(runs, key=settings), key=settings)]
