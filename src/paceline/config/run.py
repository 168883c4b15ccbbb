"""`RunConfig`: one training of one workload under one strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.checkpoint_interval import CheckpointInterval
from paceline.config.launch import LaunchConfig
from paceline.config.recipe import SHARE, OptimizerName, Precision, ScaleRule, ScheduleName
from paceline.config.setting import NOT_NEGATIVE, POSITIVE, Bound, CommandName, check_values, select, setting
from paceline.config.slow_ranks import parse_slow_ranks
from paceline.config.whole_number import whole_number
from paceline.errors import UsageError

Device = Literal["auto", "cpu", "cuda"]
Backend = Literal["auto", "gloo", "nccl"]
BatchNormMode = Literal["broadcast", "local", "sync"]
ReplicaGuardMode = Literal["stop", "warn", "off"]
OnNan = Literal["stop", "skip"]
NoiseScaleMode = Literal["auto", "all", "off"]
CheckpointMode = Literal["off", "sync", "async"]
CudaGraphMode = Literal["auto", "on", "off"]
OnCheckpointError = Literal["continue", "stop"]
TestAugmentation = Literal["none", "mirror", "mirror+shift"]
BindTo = Literal["none", "core"]
DEFAULT_STRATEGY = "ddp"
"""Strategy of a run that names none, and the one that others are compared with: the one that most users have."""
ENDLESS = 10**9
"""Number of epochs of a run that ends by time: more than any run trains."""
MOST_PROFILED_STEPS = 50
"""Most steps to profile: each produces thousands of events, which stay in memory until they are aggregated."""
SEEDS = Bound("from 0 to 2^40", lambda value: 0 <= value < 2**40)
CHANGES_NOTHING = "it changes nothing that is measured"
SAFETENSORS_SUFFIX = ".safetensors"
EPOCH = "epoch"
"""Value of `eval_every` for an evaluation after each epoch."""
ACCURACY = Bound("more than 0, and 1 at most, as in 0.94 for 94%", lambda value: 0 < value <= 1)

HANG_TIMEOUT_S = 60.0
"""Default of `hang_timeout`."""
GROUP_TIMEOUT_MARGIN_S = 60.0
"""Seconds that process groups wait longer than the watchdog, which names what hangs."""


def group_timeout_s(hang_timeout_s: float) -> float:
    """Return the default time-out of process groups, for a time-out of the watchdog, 0 without one."""
    return (hang_timeout_s or HANG_TIMEOUT_S) + GROUP_TIMEOUT_MARGIN_S


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training of one workload under one strategy."""

    workload: str = setting("cnn", positional=True)
    """Workload to train: cnn, vgg11, resnet18, or your own as my_module:make_workload (imported from this folder)."""
    data: str = setting("digits", replaced_by="train")
    """Data set of the built-in models: digits, synthetic, cifar10 or svhn; options as in synthetic:size=5000
    or svhn:extra=true, which adds the 531,131 images of SVHN's extra set."""
    data_dir: str = setting("", compared=False, per_host=True, may_change=True)
    """Folder for downloaded data sets [default: the user's cache folder]."""
    augment: bool = setting(True, replaced_by="train")
    """Augment with random crops and flips, if the data set defines them."""
    strategy: str = setting(
        DEFAULT_STRATEGY, fixed="name strategies with --strategies a,b", compared=False, unused_by=("compare", "scale")
    )
    """Way of synchronising gradients; options as in ddp:bucket_mb=1. `paceline strategies` lists all."""
    batch: int | None = setting(None, bound=POSITIVE, unused_by=("batch", "large-batch"), set_by_leader=True)
    """Global batch: samples per step over all ranks [default: 256]."""
    batch_per_rank: int | None = setting(
        None,
        bound=POSITIVE,
        in_place_of="batch",
        fixed="vary batch, the global one",
        unused_by=("batch", "large-batch"),
        set_by_leader=True,
    )
    """Samples per step on each rank, in place of --batch."""
    accumulate: int = setting(1, bound=POSITIVE, unused_by=("large-batch",))
    """Micro-batches per step: their gradients are summed and synchronised once."""
    epochs: int | None = setting(None, bound=POSITIVE, ends_run=True, unused_by=("doctor",))
    """Passes over the training data [default: 1, unless --steps or --seconds is given]."""
    steps: int | None = setting(
        None, bound=POSITIVE, in_next_command=False, ends_run=True, script="same", unused_by=("large-batch", "doctor")
    )
    """Stop after this many steps; --epochs is then only used to estimate the time of a full run."""
    seconds: float | None = setting(
        None, bound=POSITIVE, in_next_command=False, ends_run=True, unused_by=("large-batch", "doctor")
    )
    """Stop after this many seconds of training on the slowest rank, or earlier if --steps or --epochs is reached. The
    time of evaluations does not count."""
    recipe: str = setting("", compared=False)
    """Recipe to train by: default, classic (the settings of the published experiments), or a TOML file with any of the
    settings from --optimizer to --precision [default: the workload's own]."""
    optimizer: OptimizerName | None = setting(None, replaced_by="optimizer")
    """Optimiser: sgd, adamw, lars, lamb or muon [default: the recipe's]. Refused if the workload defines its own."""
    lr: float | None = setting(None, bound=NOT_NEGATIVE, replaced_by="optimizer")
    """Peak learning rate, used as given unless --scale-lr is given too [default: the recipe's, scaled to the batch]."""
    scale_lr: ScaleRule | None = setting(None, replaced_by="optimizer", unused_by=("large-batch",))
    """Scale the learning rate by global batch ÷ reference batch (linear), by its square root (sqrt), or not (none)
    [default: the recipe's]."""
    reference_batch: int | None = setting(None, bound=POSITIVE, replaced_by="optimizer", unused_by=("large-batch",))
    """Global batch that the learning rate is meant for [default: the recipe's]."""
    momentum: float | None = setting(None, bound=SHARE, replaced_by="optimizer")
    """Momentum of SGD, LARS and Muon [default: the recipe's]."""
    nesterov: bool | None = setting(None, replaced_by="optimizer")
    """Use Nesterov momentum, with SGD or LARS [default: the recipe's]."""
    weight_decay: float | None = setting(None, bound=NOT_NEGATIVE, replaced_by="optimizer")
    """Weight decay [default: the recipe's]."""
    schedule: ScheduleName | None = setting(None, replaced_by="scheduler")
    """Learning rate after warm-up: constant, step (÷ 10 at half and at three quarters of the run), cosine or triangular
    (to 0 along a cosine or a straight line) [default: the recipe's]."""
    warmup_epochs: float | None = setting(None, bound=NOT_NEGATIVE, replaced_by="scheduler")
    """Epochs in which the learning rate rises linearly from 0. In a run of less than twice as many epochs it rises as
    fast for half of the run, to a lower peak [default: the recipe's]."""
    warmup_steps: int | None = setting(None, bound=NOT_NEGATIVE, replaced_by="scheduler", unused_by=("large-batch",))
    """Least number of steps of warm-up [default: the recipe's; 0 if --warmup-epochs is given]."""
    label_smoothing: float | None = setting(None, bound=SHARE)
    """Share of probability that the training loss spreads over all classes [default: the recipe's]."""
    cutout: int | None = setting(None, bound=NOT_NEGATIVE)
    """Side of a square, in pixels, that is cut out of each training image at a random place; only for data sets with
    augmentation [default: the recipe's]."""
    zero_gamma: bool | None = setting(None, unused_by=("large-batch",))
    """Start the last BatchNorm of each residual block with weight 0 [default: the recipe's]."""
    clip_norm: float | None = setting(None, bound=POSITIVE, unused_by=("doctor",))
    """Clip the synchronised gradient to this norm."""
    seed: int = setting(
        0,
        bound=SEEDS,
        set_by_leader=True,
        fixed="each repeat has its own seed, the same for all candidates",
        compared=False,
        script="same",
        unused_by=("doctor",),
    )
    """Seed of the initial weights, the sample order and the augmentation."""
    reshuffle: bool = setting(True, unused_by=("doctor",))
    """Shuffle the samples anew each epoch; --no-reshuffle shows the effect of a forgotten set_epoch."""
    bn: BatchNormMode = setting("broadcast", script="attach")
    """BatchNorm: broadcast rank 0's buffers before each step, keep buffers local, or sync statistics over all ranks."""
    precision: Precision | None = None
    """Number format: fp32, bf16 or fp16 (autocast; weights and gradients stay float32; fp16 scales the loss, and is
    slow on most CPUs), fp64 (for parity proofs), or auto: bf16 with --channels-last if a few passes of this model are
    faster in it and give the same loss, else fp32 [default: the recipe's, usually fp32]."""
    channels_last: bool = False
    """Use the channels-last memory format for images and volumes; with bf16 about twice as fast on recent CPUs."""
    device: Device = "auto"
    """Device to train on; auto takes cuda if a GPU is available, else cpu."""
    cuda_graph: CudaGraphMode | None = setting(None, unused_by=("doctor",))
    """Replay forward, backward and update as CUDA graphs: a GPU then does not wait for the host to start each kernel.
    auto takes them if a few steps have the same losses and weights as without, and says why if it does not; on stops
    then [default: auto, silent where the strategy or the settings rule graphs out]."""
    compile: bool = setting(False, unused_by=("doctor",))
    """Compile the model with torch.compile before the first step. Evaluation, and batches of another size than the
    first, run without; the parity proof does, too."""
    bind_to: BindTo = setting("none", unused_by=("doctor",))
    """Bind ranks to cores: none leaves their place to the system, core gives each rank of a host an equal part of its
    cores, which helps only if no other program uses them."""
    backend: Backend = "auto"
    """Communication back end; auto takes nccl if every rank has its own GPU, else gloo."""
    deterministic: bool = False
    """Use deterministic kernels: the same losses for any world size, up to rounding (with BatchNorm, add --bn sync)."""
    allow_unused: bool = setting(False, script="attach")
    """Accept parameters that receive no gradient; by default they are named and the run stops."""
    replica_guard: ReplicaGuardMode = setting("stop", script="attach", unused_by=("doctor",))
    """Compare the weights of all ranks by checksums while training, for about 0.1% of the time of a long run. If they
    differ: stop, or warn and train on."""
    on_nan: OnNan = setting("stop", unused_by=("doctor",))
    """If the loss becomes NaN or infinite: stop the run, or skip every step whose gradients are not finite, on all
    ranks together, as with a GradScaler. A candidate of a comparison that stops is left out."""
    noise_scale: NoiseScaleMode = setting(
        "off",
        fixed=CHANGES_NOTHING,
        compared=False,
        in_next_command=False,
        may_change=True,
        script="own",
        unused_by=("scale", "doctor"),
    )
    """Measure the gradient noise scale, which estimates the batch above which larger ones pay less: in as many steps as
    0.4% of the training time allows, and every 200th at least (auto), in all steps (all), or not (off). It needs
    several ranks, or --accumulate."""
    events: bool = setting(True, in_next_command=False, script="same", unused_by=("doctor",))
    """Record start and end of each phase and each communication operation; costs 2% of a step of a few milliseconds,
    less of longer ones."""
    trace: bool = setting(
        False, compared=False, in_next_command=False, may_change=True, script="same", unused_by=("doctor",)
    )
    """Write each run's timeline to trace.json in its folder; open it at ui.perfetto.dev."""
    log_every: int = setting(
        20,
        bound=POSITIVE,
        fixed="it sets the length of the timed windows; compare separate experiments instead",
        compared=False,
        in_next_command=False,
        script="same",
        unused_by=("doctor",),
    )
    """Steps per window: the unit of timing, and of log lines with the global loss."""
    eval_ranks: bool = setting(False, in_next_command=False, unused_by=("scale", "doctor"))
    """Also test each rank's own replica, not only the synchronised weights."""
    evaluate: bool = setting(True, in_next_command=False, unused_by=("scale", "race", "large-batch", "doctor"))
    """Test the synchronised weights at the end of the run."""
    eval_every: str = setting(
        "", fixed=CHANGES_NOTHING, compared=False, in_next_command=False, numbers=True, unused_by=("scale", "doctor")
    )
    """Also test the synchronised weights while training: after every N steps, or after every epoch (epoch). It changes
    neither the weights nor step times, since evaluations are between the timed windows."""
    target: float | None = setting(
        None,
        bound=ACCURACY,
        fixed="`paceline race` measures the time to a test accuracy",
        compared=False,
        in_next_command=False,
        unused_by=("compare", "scale", "batch", "large-batch", "doctor"),
    )
    """Stop as soon as an evaluation reaches this test accuracy, as in 0.94, or at the length of the run if none does.
    Without --eval-every, the weights are tested after every epoch."""
    tta: TestAugmentation = setting("none", in_next_command=False, unused_by=("scale", "doctor"))
    """Test-time augmentation: none, mirror or mirror+shift. It tests the mean of the model's outputs for an image and
    for its mirror image, or for these two and both shifted by a pixel in two directions; only for images whose mirror
    image has the same class. Training does not change."""
    checkpoint_every: str = setting("", compared=False, may_change=True, numbers=True, unused_by=("doctor",))
    """Write a checkpoint after every N steps (100), after so much training time (30s, 10m, 1h), or after every epoch
    (epoch), and at the end of the run."""
    checkpoint: CheckpointMode | None = setting(None, in_next_command=False, unused_by=("doctor",))
    """Way of writing checkpoints: sync waits until they are on disk, async goes on training meanwhile, off writes none
    [default: async with --checkpoint-every, else off]."""
    keep: int = setting(
        2,
        bound=POSITIVE,
        fixed=CHANGES_NOTHING,
        compared=False,
        in_next_command=False,
        may_change=True,
        unused_by=("doctor",),
        needs="checkpoint_every",
    )
    """Number of checkpoints to keep: the latest ones. The best by test accuracy is kept in addition."""
    on_checkpoint_error: OnCheckpointError = setting(
        "continue",
        fixed=CHANGES_NOTHING,
        compared=False,
        in_next_command=False,
        may_change=True,
        unused_by=("doctor",),
        needs="checkpoint_every",
    )
    """If a checkpoint cannot be written, for example because the disk is full: go on training with a warning, or
    stop."""
    save: str = setting(
        "",
        fixed=CHANGES_NOTHING,
        compared=False,
        in_next_command=False,
        may_change=True,
        unused_by=("compare", "scale", "batch", "race", "large-batch", "doctor"),
    )
    """File to write the final weights to, as in model.safetensors; it depends on the weights alone."""
    tensorboard: bool = setting(
        False,
        fixed=CHANGES_NOTHING,
        compared=False,
        in_next_command=False,
        may_change=True,
        script="same",
        unused_by=("doctor",),
    )
    """Also write loss, accuracy, throughput, time split, CPU and memory for TensorBoard while training."""
    profile: str = setting(
        "", fixed=CHANGES_NOTHING, compared=False, in_next_command=False, script="same", unused_by=("doctor",)
    )
    """Steps to profile with torch's profiler, counted from 0, as in 20-22; they are left out of step times."""
    slow_rank: str = setting("", in_next_command=False, script="varied", unused_by=("doctor",))
    """Slow ranks down: 1:3 makes rank 1 compute three times as long; 1:3,2:1.5 slows two ranks."""
    hang_timeout: float = setting(
        HANG_TIMEOUT_S, bound=NOT_NEGATIVE, fixed=CHANGES_NOTHING, compared=False, may_change=True, script="same"
    )
    """Seconds without any progress on any rank after which a run counts as hung: the error names what each rank waits
    in, and all ranks are ended. 0: never."""
    timeout: float | None = setting(
        None, bound=POSITIVE, fixed=CHANGES_NOTHING, compared=False, may_change=True, script="same"
    )
    """Seconds a rank waits for other ranks before it fails [default: --hang-timeout + 60]."""
    check_collectives: bool = setting(
        False,
        fixed="it slows steps down, in all runs alike",
        compared=False,
        in_next_command=False,
        may_change=True,
        script="same",
    )
    """Compare kind, size and dtype of every collective and message of the ranks before it runs, and name both calls
    where they differ; slow."""

    def __post_init__(self) -> None:
        check_values(self)
        if self.batch is not None and self.batch_per_rank is not None:
            raise UsageError(
                "--batch and --batch-per-rank were both given.",
                hint="give one of them: --batch-per-rank times the ranks is --batch",
            )
        if self.trace and not self.events:
            raise UsageError(
                "--trace was given with --no-events.",
                hint="leave --no-events out: a trace consists of the recorded events",
            )
        self._check_profile()
        self._check_evaluation()
        self._check_checkpoints()
        _ = self.slowed

    @property
    def timeout_s(self) -> float:
        """Seconds a rank waits for other ranks before it fails."""
        return self.timeout or group_timeout_s(self.hang_timeout)

    @property
    def has_length(self) -> bool:
        """Whether a setting gives the length of the run."""
        return any(getattr(self, name) is not None for name in LENGTH_SETTINGS)

    @property
    def most_epochs(self) -> int:
        """Epochs after which a run ends, unless its steps or its time end it earlier."""
        return self.epochs or (ENDLESS if self.seconds else 1)

    @property
    def slowed(self) -> dict[int, float]:
        """Slow-down factor of each rank that is slowed down on purpose."""
        return parse_slow_ranks(self.slow_rank)

    @property
    def profiled_steps(self) -> range:
        """Steps to profile; empty without `profile`."""
        return step_range(self.profile, "--profile") if self.profile else range(0)

    def _check_profile(self) -> None:
        steps = self.profiled_steps
        if len(steps) > MOST_PROFILED_STEPS:
            raise UsageError(
                f"--profile {self.profile} names {len(steps)} steps.",
                hint=f"profile at most {MOST_PROFILED_STEPS} steps; a few are usually enough",
            )
        if steps and self.steps is not None and steps.stop > self.steps:
            raise UsageError(
                f"--profile {self.profile} is outside the run's {self.steps} steps.",
                hint=f"steps are counted from 0, so the last one is {self.steps - 1}",
            )

    @property
    def eval_steps(self) -> int | None:
        """Steps between two evaluations while training; None if they follow epochs, or if there are none."""
        return whole_number(self.eval_every)

    @property
    def evaluates_while_training(self) -> bool:
        """Whether the weights are also tested before the end of the run."""
        return bool(self.eval_every) or self.target is not None

    def is_target(self, accuracy: float | None) -> bool:
        """Return whether a test accuracy ends the run; None if it is not known."""
        return self.target is not None and accuracy is not None and accuracy >= self.target

    def _check_evaluation(self) -> None:
        unused = {"--eval-ranks": self.eval_ranks, "--target": self.target, "--tta": self.tta != "none"}
        option = next((name for name, value in unused.items() if value), None)
        if option is not None and not self.evaluate:
            raise UsageError(f"{option} was given with --no-evaluate.", hint="leave one of the two out")
        if not self.eval_every:
            return
        if self.eval_every != EPOCH and not (self.eval_steps or 0) > 0:
            raise UsageError(
                f"--eval-every is {self.eval_every!r}.",
                hint="write a number of steps, 1 or more, as in --eval-every 100, or --eval-every epoch",
            )
        if not self.evaluate:
            raise UsageError(
                "--eval-every was given with --no-evaluate.",
                hint="leave --no-evaluate out, to test while training and at the end; or leave --eval-every out",
            )

    @property
    def checkpoint_mode(self) -> CheckpointMode:
        """Way of writing checkpoints; `off` if there are none."""
        return self.checkpoint or ("async" if self.checkpoint_every else "off")

    @property
    def checkpoint_interval(self) -> CheckpointInterval | None:
        """Time between two checkpoints; None if none are written."""
        if self.checkpoint_mode == "off":
            return None
        return CheckpointInterval.parse(self.checkpoint_every, "--checkpoint-every")

    def _check_checkpoints(self) -> None:
        if self.checkpoint in ("sync", "async") and not self.checkpoint_every:
            raise UsageError(
                f"--checkpoint {self.checkpoint} was given without --checkpoint-every.",
                hint="say how often to write one: --checkpoint-every 100 (steps), 30s, or epoch",
            )
        _ = self.checkpoint_interval
        if self.save and not self.save.endswith(SAFETENSORS_SUFFIX):
            raise UsageError(f"--save is {self.save!r}.", hint=f"name a file that ends with {SAFETENSORS_SUFFIX}")

    def global_batch(self, workers: int) -> int:
        """Return the samples per step over all workers; raise if a worker or a micro-batch would get none."""
        batch = self.batch or (self.batch_per_rank or 0) * workers or 256
        if batch < workers * self.accumulate:
            pieces = f"{workers} ranks" + (f" × {self.accumulate} micro-batches" if self.accumulate > 1 else "")
            raise UsageError(
                f"a global batch of {batch} leaves some of the {pieces} without a sample.",
                hint=f"use --batch {workers * self.accumulate} or more, or fewer ranks",
            )
        return batch


LENGTH_SETTINGS = select(RunConfig, lambda metadata: metadata.ends_run)
"""Settings that set the length of a run."""
EXAMINED_SETTINGS = select(RunConfig, lambda metadata: "doctor" not in metadata.unused_by)
"""Settings that `paceline doctor` uses: those that change what a run needs of machines and links."""


def settings_unused_by(command: CommandName) -> frozenset[str]:
    """Return the settings of a run and of a launch that a command has no use for."""
    return frozenset(
        name for kind in (RunConfig, LaunchConfig) for name in select(kind, lambda found: command in found.unused_by)
    )


def step_range(text: str, option: str) -> range:
    """Parse a step or a range of steps, written 20 or 20-22."""
    written, dash, end = text.partition("-")
    first, last = whole_number(written.strip()), whole_number((end if dash else written).strip())
    if first is None or last is None:
        raise UsageError(f"{option} is {text!r}.", hint="write one step as 20, or a range as 20-22")
    steps = range(first, last + 1)
    if not steps:
        raise UsageError(f"{option} {text!r} ends before it begins.", hint=f"did you mean {last}-{first}?")
    return steps
