"""What the command line, a TOML file and the Python API all build: what is trained and how, where, what is measured.

`RunConfig` is what is trained and how; `LaunchConfig` is who starts the ranks and where; `CompareConfig` and
`ScaleConfig` are what an experiment measures. A field's docstring is its help text on the command line, its name (with
dashes) the option, its name (with underscores) the key in a TOML file.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.config.emulation import EmulationInfo, parse_hosts
from paceline.config.fields import NUMBERS, check_bounds, check_choices
from paceline.config.slow_ranks import parse_slow_ranks
from paceline.errors import UsageError, wrong_choice

Device = Literal["auto", "cpu", "cuda"]
Backend = Literal["auto", "gloo", "nccl"]
BatchNormMode = Literal["broadcast", "local", "sync"]
Precision = Literal["fp32", "bf16", "fp64"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training of one workload under one strategy."""

    workload: str = "cnn"
    """What is trained: cnn, vgg11, resnet18, or my_module:make_workload, found from the current folder."""
    data: str = "digits"
    """Data set for the built-in models: digits, synthetic, cifar10 or svhn, with options as synthetic:size=5000."""
    data_dir: str = ""
    """Folder of the downloaded data sets [default: the user's cache folder]."""
    svhn_extra: bool = False
    """Add SVHN's extra 531,131 images to its training set."""
    augment: bool = True
    """Random crops and flips, where the data set has them."""
    strategy: str = "ddp"
    """How ranks agree, with options as ddp:bucket_mb=1; `paceline strategies` lists them."""
    batch: int | None = None
    """Global batch: samples per step over all ranks [default: 256]."""
    batch_per_rank: int | None = None
    """The other way to say it: samples per step on each rank."""
    accumulate: int = 1
    """Micro-batches per step: gradients are summed over them and synchronised once."""
    epochs: int | None = None
    """Passes over the training data [default: 1, unless --steps is given]."""
    steps: int | None = None
    """Stop after this many steps; --epochs is then what the time is estimated for."""
    seconds: float | None = None
    """Stop after this many seconds of training, on the slowest rank's clock; alone, or before --steps or --epochs."""
    lr: float = 0.1
    """Learning rate of SGD, for the global batch: not scaled by the ranks. A workload's own optimiser has its own."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Weight decay of SGD."""
    clip_norm: float | None = None
    """Clip the global gradient to this norm, after the ranks agreed on it."""
    seed: int = 0
    """Seed of the weights, the order of the samples and the augmentation."""
    reshuffle: bool = True
    """A new order of samples each epoch; --no-reshuffle shows what a forgotten set_epoch does."""
    bn: BatchNormMode = "broadcast"
    """BatchNorm buffers: broadcast rank 0's before each step, keep them local, or sync the statistics of all ranks."""
    precision: Precision = "fp32"
    """fp32, bf16 (autocast; weights and gradients stay float32), or fp64 (for proofs)."""
    channels_last: bool = False
    """Lay images out channels-last; with bf16 about twice as fast on recent CPUs."""
    device: Device = "auto"
    """Where to train: cuda where there is a GPU, cpu elsewhere."""
    backend: Backend = "auto"
    """Who moves the bytes: nccl where each rank has a GPU of its own, gloo elsewhere."""
    deterministic: bool = False
    """Deterministic kernels: the same losses on any number of ranks, up to rounding (with BatchNorm: --bn sync)."""
    allow_unused: bool = False
    """Let parameters get no gradient in a step, instead of naming them and stopping."""
    events: bool = True
    """Note when each phase of a step and each operation on the wire begins and ends; it costs a few microseconds."""
    trace: bool = False
    """Write each run's timeline as a trace, trace.json in its folder, which ui.perfetto.dev opens."""
    log_every: int = 20
    """Steps between two reports of the global loss."""
    eval_ranks: bool = False
    """Test every rank's replica too, not only the agreed weights."""
    evaluate: bool = True
    """Test the agreed weights at the end of the run."""
    tensorboard: bool = False
    """Write losses, accuracy, speed, the time split, CPU and memory for TensorBoard too, while training."""
    profile: str = ""
    """Steps to run torch's profiler on, counted from 0, as 20-22; their time does not count."""
    slow_rank: str = ""
    """Make ranks compute more slowly, as 1:3 for a rank 1 that takes three times as long, or 1:3,2:1.5 for two."""
    timeout: float = 120.0
    """Seconds after which a rank that waits for others gives up."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.batch is not None and self.batch_per_rank is not None:
            raise UsageError("--batch and --batch-per-rank were both given.", hint="they are two ways to say one thing")
        if self.trace and not self.events:
            raise UsageError("--trace was given with --no-events.", hint="a trace is made of events")
        counts = ("batch", "batch_per_rank", "accumulate", "epochs", "steps", "log_every")
        check_bounds(self, (*counts, "seconds", "timeout", "clip_norm"), lambda value: value > 0, "more than 0")
        check_bounds(self, ("lr", "momentum", "weight_decay"), lambda value: value >= 0, "0 or more")
        check_bounds(self, ("seed",), lambda value: 0 <= value < 2**40, "from 0 to 2^40")
        check_bounds(
            self,
            ("lr", "momentum", "weight_decay", "clip_norm", "timeout", "seconds"),
            math.isfinite,
            "a finite number",
        )
        self._check_profile()
        _ = self.slowed

    @property
    def most_epochs(self) -> int:
        """After how many epochs a run ends, if its steps or its time do not end it before."""
        return self.epochs or (ENDLESS if self.seconds else 1)

    @property
    def slowed(self) -> dict[int, float]:
        """By rank, how many times as long it computes on purpose."""
        return parse_slow_ranks(self.slow_rank)

    @property
    def profiled_steps(self) -> range:
        """The steps that `profile` names; none without it."""
        return step_range(self.profile, "--profile") if self.profile else range(0)

    def _check_profile(self) -> None:
        steps = self.profiled_steps
        if len(steps) > MOST_PROFILED_STEPS:
            raise UsageError(
                f"--profile {self.profile} names {len(steps)} steps.",
                hint=f"{MOST_PROFILED_STEPS} are the most it takes, and a few show as much",
            )
        if steps and self.steps is not None and steps.stop > self.steps:
            raise UsageError(
                f"--profile {self.profile} goes beyond the run's {self.steps} steps.",
                hint=f"steps count from 0, so the last one is {self.steps - 1}",
            )

    def global_batch(self, workers: int) -> int:
        """Samples per step over all workers; refuses a batch that leaves a worker (or a micro-batch of it) empty."""
        batch = self.batch or (self.batch_per_rank or 0) * workers or 256
        if batch < workers * self.accumulate:
            pieces = f"{workers} ranks" + (f" × {self.accumulate} micro-batches" if self.accumulate > 1 else "")
            raise UsageError(
                f"a global batch of {batch} leaves some of the {pieces} without a sample.",
                hint=f"use --batch {workers * self.accumulate} or more, or fewer ranks",
            )
        return batch


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Who starts the ranks, and where."""

    ranks: int | None = None
    """World size over all hosts [default: 1 for `single`; else one per GPU, or 2 on a CPU]."""
    ranks_per_host: int | None = None
    """The other way to say it: ranks on each host."""
    hosts: int = 1
    """Hosts that take part; start the same command on each, with its own --node-rank."""
    node_rank: int = 0
    """Which of the hosts this is, from 0; host 0 is the one --master names."""
    master: str | None = None
    """Where the hosts meet: ADDRESS:PORT of host 0 [default: a free port on the loopback address]."""
    iface: str | None = None
    """Network interface of this host [default: the one that routes to the master]."""
    threads: int | None = None
    """CPU threads per rank [default: usable cores ÷ ranks on the host]."""
    emulate: str = ""
    """Emulate hosts on this machine, as 4, 4@200mbit, 4@200mbit+5ms or 2@1gbit,2@100mbit; needs root."""
    host_cpus: float | None = None
    """Cores that the ranks of each emulated host share, as 0.5 [default: no limit]."""

    def __post_init__(self) -> None:
        check_bounds(self, ("ranks", "ranks_per_host", "hosts", "threads"), lambda value: value > 0, "more than 0")
        self._check_emulation()
        if not 0 <= self.node_rank < self.hosts:
            raise UsageError(
                f"--node-rank {self.node_rank} is not one of {self.hosts} hosts.",
                hint=f"hosts count from 0 to {self.hosts - 1}",
            )
        if self.ranks is not None and self.ranks % self.hosts:
            raise UsageError(
                f"{self.ranks} ranks do not divide over {self.hosts} hosts.",
                hint="--ranks is the world size; --ranks-per-host is the other way to say it",
            )
        both = self.ranks is not None and self.ranks_per_host is not None
        if both and self.ranks != (self.ranks_per_host or 0) * self.hosts:
            raise UsageError(
                f"--ranks {self.ranks} is not {self.hosts} hosts × --ranks-per-host {self.ranks_per_host}.",
                hint="give one of the two",
            )

    def _check_emulation(self) -> None:
        check_bounds(self, ("host_cpus",), lambda value: 0.01 <= value <= 1024, "from 0.01 to 1024 cores")
        if self.host_cpus is not None and not self.emulate:
            raise UsageError(
                f"--host-cpus {self.host_cpus:g} was given without --emulate.",
                hint="it is the share of an emulated host, as in --emulate 4 --host-cpus 0.5",
            )
        if not self.emulate:
            return
        hosts = len(parse_hosts(self.emulate))
        other = {"hosts": self.hosts != 1, "node_rank": self.node_rank != 0, "master": self.master, "iface": self.iface}
        given = [name for name, value in other.items() if value]
        if given:
            raise UsageError(
                f"--emulate and --{given[0].replace('_', '-')} were both given.",
                hint="emulated hosts are all started here, with addresses of their own: leave the other one out",
            )
        self.on_emulated_host(EmulationInfo(spec=self.emulate, host=0, hosts=hosts, master="198.18.0.1:1"))

    def on_emulated_host(self, place: EmulationInfo) -> LaunchConfig:
        """The same launch, as one of the hosts that were made for it sees it."""
        return replace(self, emulate="", host_cpus=None, hosts=place.hosts, node_rank=place.host, master=place.master)

    def local_ranks(self, default: int) -> int:
        """Ranks on this host, given what one host takes when the user said nothing."""
        if self.ranks is not None:
            return self.ranks // self.hosts
        return self.ranks_per_host or default


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig:
    """What is compared, and how often it is measured."""

    strategies: str = ""
    """Strategies to compare, as single,ddp,ddp:bucket_mb=1; or a set: usual (the classic ones, shared_memory and
    priority), classic, fast, or all [default: usual; with --vary: ddp]."""
    vary: tuple[str, ...] = ()
    """Compare a setting: KEY=A,B, with KEY any option of `paceline train`; may be given several times."""
    repeats: int = 3
    """How often everything is measured, interleaved; each repeat has its own seed."""
    max_repeats: int = 10
    """Measure up to this often while the two fastest cannot be told apart."""
    proof: bool = True
    """Prove first that every strategy computes the same mean gradient."""
    doctor: bool = True
    """Examine the machine and the link first, as `paceline doctor` does: some ten seconds."""
    script: str = ""
    """Compare with a training script of your own, which calls paceline.attach; its arguments follow `--`."""

    def __post_init__(self) -> None:
        check_bounds(self, ("repeats", "max_repeats"), lambda value: value > 0, "more than 0")

    @property
    def interim_analyses(self) -> int:
        """How often the experiment may stop and ask whether there is a winner."""
        return max(1, self.max_repeats - self.repeats + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleConfig:
    """Over which ranks a workload is scaled, how, and how often that is measured."""

    strategies: str = ""
    """Strategies to scale, as ddp,p2p; `single` is always measured too, `none` as the bound when it is named [default:
    gather_scatter,p2p,allreduce,ddp]."""
    ranks: str = field(default="", metadata=NUMBERS)
    """World sizes, as 1,2,4; 1 is always measured [default: powers of two up to what there is]."""
    ranks_per_host: str = field(default="", metadata=NUMBERS)
    """Ranks on a host, as 1,2 to measure the same ranks on more and on fewer hosts [default: as few as possible]."""
    mode: str = "strong"
    """strong keeps the global batch, weak the batch per rank; strong,weak measures both."""
    batch: int | None = None
    """Global batch of strong scaling [default: 256; with --batch-per-rank: that × the most ranks]."""
    batch_per_rank: int | None = None
    """Batch per rank of weak scaling [default: --batch ÷ the most ranks]."""
    repeats: int = 3
    """How often everything is measured, interleaved; each repeat has its own seed."""
    proof: bool = True
    """Prove first that every strategy computes the same mean gradient, on the most ranks."""
    doctor: bool = True
    """Examine the machine and the link first, as `paceline doctor` does, on the most ranks."""

    def __post_init__(self) -> None:
        check_bounds(self, ("repeats", "batch", "batch_per_rank"), lambda value: value > 0, "more than 0")
        for mode in self.modes:
            if mode not in SCALING_MODES:
                raise wrong_choice("--mode", mode, SCALING_MODES)
        if not self.modes:
            raise UsageError("--mode names no kind of scaling.", hint="use strong, weak, or strong,weak")
        _ = self.rank_counts, self.per_host

    @property
    def modes(self) -> tuple[str, ...]:
        """The kinds of scaling, strong first."""
        given = [mode.strip() for mode in self.mode.split(",") if mode.strip()]
        return tuple(sorted(dict.fromkeys(given)))

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """The world sizes that were named, in order."""
        return _counts(self.ranks, "--ranks")

    @property
    def per_host(self) -> tuple[int, ...]:
        """The numbers of ranks on a host that were named, in order."""
        return _counts(self.ranks_per_host, "--ranks-per-host")

    @property
    def max_repeats(self) -> int:
        """No more than that: there is no winner to wait for."""
        return self.repeats


SCALING_MODES = ("strong", "weak")


def _counts(text: str, option: str) -> tuple[int, ...]:
    """The numbers in a text as 1,2,4, each once, least first."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = next((word for word in words if not word.isdecimal() or int(word) < 1), None)
    if wrong is not None:
        raise UsageError(f"{option} {text} is not a list of numbers from 1 on: {wrong!r}.", hint="write it as 1,2,4")
    return tuple(sorted({int(word) for word in words}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A training script of the user's own, which calls `paceline.attach` in a loop of its own."""

    path: str
    args: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    """Settings of `RunConfig` that win over what the script gives to `attach`: those that the user has named."""

    @property
    def name(self) -> str:
        """What it is called."""
        return Path(self.path).name

    def settings_to_keep(self, config: RunConfig) -> dict[str, Any]:
        """What a record says of its configuration; all else is the script's own."""
        return {
            "workload": self.name,
            "script": self.path,
            "args": list(self.args),
            **{name: getattr(config, name) for name in ("strategy", *SCRIPT_SETTINGS)},
        }


ENDLESS = 10**9
"""More epochs than anybody waits for."""
MOST_PROFILED_STEPS = 50
"""A step leaves thousands of events, all of which are kept in memory until they are summed up."""


def step_range(text: str, option: str) -> range:
    """The steps in a text as 20 or 20-22."""
    first, dash, last = text.partition("-")
    if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
        raise UsageError(f"{option} is {text!r}.", hint="name steps as 20, or 20-22 for three of them")
    steps = range(int(first), int(last if dash else first) + 1)
    if not steps:
        raise UsageError(
            f"{option} {text} ends before it begins.", hint=f"did you mean {last.strip()}-{first.strip()}?"
        )
    return steps


ATTACH_SETTINGS = ("bn", "allow_unused")
"""Settings that `attach` takes."""
SCRIPT_SETTINGS = (
    *ATTACH_SETTINGS,
    "steps",
    "seed",
    "events",
    "trace",
    "log_every",
    "tensorboard",
    "profile",
    "slow_rank",
    "timeout",
)
"""Settings that mean something for a script."""


EXAMINED_SETTINGS = (
    "workload",
    "data",
    "data_dir",
    "svhn_extra",
    "augment",
    "strategy",
    "batch",
    "batch_per_rank",
    "accumulate",
    "momentum",
    "bn",
    "precision",
    "channels_last",
    "device",
    "backend",
    "deterministic",
    "allow_unused",
    "timeout",
)
"""Settings that change what a run needs of a machine, or which machines and links it uses: the doctor's."""


def launched() -> bool:
    """Whether a launcher, ours or torchrun, has told this process which rank it is."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


ALTERNATIVES = (("batch", "batch_per_rank"), ("ranks", "ranks_per_host"))
"""Two ways to say one thing; who says one has not said the other."""
