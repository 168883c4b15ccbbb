"""What a comparison is about, workloads that Paceline trains or a script of the user's own, and how ranks get to it.

Ranks train all candidates' workloads in turn. A script owns its process, so each of its turns starts ranks anew, and
the other side of its proof is another run of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.config import ATTACH_SETTINGS, SCRIPT_SETTINGS, CompareConfig, RunConfig, Script
from paceline.errors import UsageError
from paceline.experiments.candidates import WORKLOAD_RULES, CandidateConfig, CandidateRules, shared_settings
from paceline.experiments.estimate import estimate_s
from paceline.experiments.names import prepare_data
from paceline.launch.job import Task
from paceline.launch.launcher_process import Shape
from paceline.records.reader import read_json
from paceline.records.schema import PARITY_FILE
from paceline.strategies.base.strategy import Role, Strategy
from paceline.strategies.registry import create
from paceline.training.parity.proof import Parity
from paceline.workloads.names import is_user_workload

GRADIENTS_FILE = "gradients.pt"
VARIED_IN_SCRIPTS = (*ATTACH_SETTINGS, "slow_rank")


@dataclass(frozen=True)
class ScheduledRun:
    """A candidate's turn: what it is called, what it trains, and the folder of its run."""

    name: str
    candidate_config: CandidateConfig
    folder: Path


class Unproven(Exception):
    """Why strategies can be measured, but not proven."""


class RankLauncher(Protocol):
    """What starts ranks for a subject that has a proof of its own."""

    def launch(self, task: Task, stage: str, folder: Path, schedule: Sequence[ScheduledRun], oracle: str = "") -> None:
        """Starts ranks that take these turns; raises where one fails."""

    def run_in_order(self, task: Task, stage: str, schedule: Sequence[ScheduledRun], oracle: str = "") -> None:
        """The same for all turns; a candidate that fails is out."""


class TrainingTarget(Protocol):
    """What is compared."""

    @property
    def rules(self) -> CandidateRules:
        """What may vary, and what fits."""

    def settings(self, candidate_configs: Sequence[CandidateConfig]) -> dict[str, Any]:
        """What all entrants share, for the record."""

    def prepare(self, candidate_configs: Sequence[CandidateConfig]) -> None:
        """Gets its data, on every host."""

    def describe(
        self, candidate_configs: Sequence[CandidateConfig], ranks: int, compare: CompareConfig
    ) -> dict[str, Any]:
        """What it is called (`subject`), its global `batch` and the `estimate_s`, where known."""

    def script_of(self, scheduled: ScheduledRun) -> Script | None:
        """The script that the turn's ranks run instead of our own training."""

    def shape_of(self, scheduled: ScheduledRun) -> Shape:
        """How many processes a turn takes, on how many hosts."""

    def together(self, schedule: Sequence[ScheduledRun]) -> list[tuple[Path, list[ScheduledRun]]]:
        """The turns that the same processes take one after the other, and the folder of their job.

        Turns whose folders stand together are of one shape.
        """

    def prove(self, schedule: Sequence[ScheduledRun], launcher: RankLauncher) -> None:
        """Leaves the parity of each turn in its folder; raises `Unproven` where that cannot be."""


class WorkloadTarget:
    """Built-in workloads, and those of the user's own that our loop trains."""

    rules: CandidateRules = WORKLOAD_RULES

    def settings(self, candidate_configs: Sequence[CandidateConfig]) -> dict[str, Any]:
        return shared_settings(dataclasses.asdict(candidate_configs[0].config), candidate_configs)

    def prepare(self, candidate_configs: Sequence[CandidateConfig]) -> None:
        for candidate_config in candidate_configs:
            prepare_data(candidate_config.config)

    def describe(
        self, candidate_configs: Sequence[CandidateConfig], ranks: int, compare: CompareConfig
    ) -> dict[str, Any]:
        config = candidate_configs[0].config
        return {
            "target": config.workload if is_user_workload(config.workload) else f"{config.workload} on {config.data}",
            "batch": None
            if len({candidate_config.config.batch for candidate_config in candidate_configs}) > 1
            else config.global_batch(ranks),
            "estimate_s": estimate_s(
                candidate_configs, ranks, compare.repeats, proof=compare.proof, doctor=compare.doctor
            ),
        }

    def script_of(self, scheduled: ScheduledRun) -> Script | None:  # noqa: ARG002
        return None

    def shape_of(self, scheduled: ScheduledRun) -> Shape:
        return scheduled.candidate_config.shape

    def together(self, schedule: Sequence[ScheduledRun]) -> list[tuple[Path, list[ScheduledRun]]]:
        return [
            (folder, list(alike))
            for folder, alike in itertools.groupby(schedule, key=lambda scheduled: scheduled.folder.parent)
        ]

    def prove(self, schedule: Sequence[ScheduledRun], launcher: RankLauncher) -> None:
        launcher.run_in_order("prove", "proof", schedule)


class ScriptRules:
    """What may vary between runs of a script, and which strategies `attach` can bring to it."""

    fixed: Mapping[str, str] = {
        field.name: f"a script decides that itself, in the arguments after `--`; vary {' or '.join(VARIED_IN_SCRIPTS)}"
        for field in dataclasses.fields(RunConfig)
        if field.name not in VARIED_IN_SCRIPTS
    } | {"strategy": "name strategies with --strategies a,b"}

    def check_names(self, config: RunConfig) -> None:
        """Those of strategies are checked when they are made."""

    def check_fit(self, config: RunConfig, strategy: Strategy, ranks: int) -> None:
        if Role.SERVER in strategy.roles(ranks):
            raise UsageError(
                f"{strategy.name} needs ranks that do not train, which a script does not have.",
                hint="leave it out of --strategies",
            )
        if not strategy.lockstep:
            raise UsageError(
                f"{config.strategy} has ranks train what they get tickets for, and a script trains shares of its own.",
                hint="leave it out of --strategies; compare it on a workload, as `paceline compare mymodule:make`",
            )


SCRIPT_RULES = ScriptRules()


@dataclass(frozen=True)
class ScriptTarget:
    """A script that calls `paceline.attach`."""

    script: Script
    rules: CandidateRules = SCRIPT_RULES

    def settings(self, candidate_configs: Sequence[CandidateConfig]) -> dict[str, Any]:
        return shared_settings(self.script.settings_to_keep(candidate_configs[0].config), candidate_configs)

    def prepare(self, candidate_configs: Sequence[CandidateConfig]) -> None:
        """A script gets its data itself."""

    def describe(
        self, candidate_configs: Sequence[CandidateConfig], ranks: int, compare: CompareConfig
    ) -> dict[str, Any]:
        del candidate_configs, ranks, compare
        return {"target": shlex.join([self.script.path, *self.script.args]), "batch": None, "estimate_s": None}

    def script_of(self, scheduled: ScheduledRun) -> Script | None:
        named = {*self.script.settings, *scheduled.candidate_config.candidate.settings}
        return replace(self.script, settings=tuple(sorted(named)))

    def shape_of(self, scheduled: ScheduledRun) -> Shape:
        """Idle ranks are left out: a script has no place for them."""
        shape = scheduled.candidate_config.shape
        busy = sum(
            role is not Role.IDLE for role in create(scheduled.candidate_config.config.strategy).roles(shape.ranks)
        )
        return shape if busy == shape.ranks else Shape(1, busy)

    def together(self, schedule: Sequence[ScheduledRun]) -> list[tuple[Path, list[ScheduledRun]]]:
        return [(scheduled.folder, [scheduled]) for scheduled in schedule]

    def prove(self, schedule: Sequence[ScheduledRun], launcher: RankLauncher) -> None:
        """Candidates only: one process sees another batch than all ranks do, and the bound promises nothing."""
        eligible = [scheduled for scheduled in schedule if scheduled.candidate_config.candidate.role == "candidate"]
        for number, alike in enumerate(_by_settings(eligible), start=1):
            folder = alike[0].folder.with_name(f"oracle-{number}")
            gradients = folder / GRADIENTS_FILE
            try:
                launcher.launch(
                    "oracle",
                    "proof",
                    folder,
                    [ScheduledRun("oracle", alike[0].candidate_config, folder)],
                    str(gradients),
                )
                launcher.run_in_order("prove", "proof", alike, str(gradients))
                if not all(_is_right(scheduled) for scheduled in alike):
                    self._prove_oracle(alike[0], folder.with_name(f"{folder.name}-again"), launcher, gradients)
            finally:
                gradients.unlink(missing_ok=True)  # As large as the model, and of no more use.

    def _prove_oracle(self, scheduled: ScheduledRun, folder: Path, launcher: RankLauncher, gradients: Path) -> None:
        """Is it the strategy that is wrong? Only if the script computes the same each time it is run."""
        launcher.launch(
            "prove_oracle",
            "proof",
            folder,
            [ScheduledRun("oracle", scheduled.candidate_config, folder)],
            str(gradients),
        )
        found = read_parity(folder)
        if found is not None and math.isinf(found.error):
            raise Unproven(
                f"{self.script.name} has gradients that are not finite, or not the same ones each time, so it cannot "
                "be proven that the strategies agree: find out why on one rank."
            )
        if found is not None and not found.holds:
            raise Unproven(
                f"{self.script.name} does not compute the same twice (two runs differ by {found.error:.1g} of the "
                "gradient's norm), so it cannot be proven that the strategies agree: seed all that is random in it."
            )


def choose_target(base: RunConfig, config: CompareConfig, args: Sequence[str]) -> tuple[TrainingTarget, RunConfig]:
    """What the user wants compared, and what its runs have in common; refuses what does not go together."""
    if config.script:
        target = _own_script(base, config.script, args)
        return target, replace(base, workload=target.script.name)
    if args:
        raise UsageError(
            f"{shlex.join(args)} was given after `--`, but there is no --script.", hint="leave it out, or add --script"
        )
    return WorkloadTarget(), base


def read_parity(folder: Path) -> Parity | None:
    """What a proof found, if it came to its end."""
    if not (folder / PARITY_FILE).is_file():
        return None
    found = read_json(folder / PARITY_FILE)
    values = {field.name: found[field.name] for field in dataclasses.fields(Parity) if field.name in found}
    values["error"] = float("inf") if values["error"] is None else values["error"]
    return Parity(**values)


def _own_script(base: RunConfig, path: str, args: Sequence[str]) -> ScriptTarget:
    if not Path(path).is_file():
        raise UsageError(f"there is no script {path} in {Path.cwd()}.", hint="--script takes the path of a python file")
    name = Path(path).name
    changed = [field.name for field in dataclasses.fields(base) if getattr(base, field.name) != field.default]
    for setting in changed:
        if setting not in SCRIPT_SETTINGS:
            option = "WORKLOAD" if setting == "workload" else f"--{setting.replace('_', '-')}"
            own = f"{name} decides that itself; its own arguments go after `--`"
            hint = "say how many --steps" if setting == "epochs" else own
            raise UsageError(f"{option} was given together with --script.", hint=hint)
    return ScriptTarget(Script(path=path, args=tuple(args), settings=tuple(s for s in ATTACH_SETTINGS if s in changed)))


def _is_right(scheduled: ScheduledRun) -> bool:
    """Whether a turn proved what it had to; one that failed says nothing against the script."""
    parity = read_parity(scheduled.folder)
    return parity is None or parity.holds or not scheduled.candidate_config.candidate.lossless


def _by_settings(schedule: Sequence[ScheduledRun]) -> Iterable[list[ScheduledRun]]:
    """Turns under the same settings have the same right gradients."""

    def settings(scheduled: ScheduledRun) -> str:
        return str(sorted(scheduled.candidate_config.candidate.settings.items()))

    return [list(alike) for _, alike in itertools.groupby(sorted(schedule, key=settings), key=settings)]
