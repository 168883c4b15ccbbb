"""Definitions of terms, and of figures that several tables show; other figures have theirs in `figures/`.

They are the source of the tooltips and of a page's last section.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """Term, and its definition."""

    key: str
    """Name in the page's HTML, distinct from that of any other definition."""
    term: str
    text: str


SPLIT_TERMS = {
    "compute": Definition(
        "split_compute",
        "Compute",
        "Time of a step in which the rank computes and no communication is in progress. Computing is the forward "
        "pass, the backward pass until the last gradient is ready, and the optimiser, without the time in which "
        "the thread only waits for communication.",
    ),
    "overlapped": Definition(
        "split_overlapped",
        "Overlapped",
        "Time of a step in which the rank computes while communication is in progress. This communication is "
        "hidden: it does not make the step longer by itself.",
    ),
    "exposed": Definition(
        "split_exposed",
        "Exposed",
        "Time of a step in which communication is in progress and the rank computes nothing. It makes the step "
        "longer. Waiting for a rank that arrives late is part of it.",
    ),
    "other": Definition(
        "split_other",
        "Other",
        "Time of a step in which the rank neither computes nor communicates: loading the batch, the strategy's own "
        "arithmetic and copies, Python overhead.",
    ),
    "data": Definition(
        "split_data",
        "Data",
        "Loading the batch: gathering, augmenting and moving it to the device. Part of Other.",
    ),
    "descheduled": Definition(
        "split_descheduled",
        "Descheduled",
        "Wall time minus CPU time of the compute thread while it computes: time in which it had no core, or slept. "
        "Part of Compute and Overlapped. Unknown on a GPU.",
    ),
}
"""Parts of the time split, by name."""
PEAK_MEMORY = Definition(
    "peak_bytes",
    "Peak memory",
    "Highest memory use of a rank during training, on the rank that used most. On a CPU it is the whole process, "
    "including PyTorch itself.",
)
WAIT = Definition(
    "wait",
    "Wait",
    "Time from a rank's arrival at an operation until the ranks that it depends on have arrived, by a clock common "
    "to all ranks. For a step: only while the rank computes nothing. For a kind of operation: the mean over "
    "isolated ones, which is the rank's own duration minus the transfer.",
)
SENT_KINDS = Definition(
    "sent_kinds",
    "Bytes sent",
    "Bytes that the busiest rank sends in one step, by content. They are derived from the operations that were "
    "recorded and from the way Gloo carries them out.",
)
LOWER_BOUND = Definition(
    "lower_bound",
    "Minimum for gradients",
    "An all-reduce of X numbers on n ranks must move at least ⌈2(n−1)/n·X⌉ × their size through the busiest rank. "
    "Sent ÷ minimum counts gradients, and weights where a strategy returns weights instead of gradients.",
)
SOCKET_BYTES = Definition(
    "socket_bytes",
    "Bytes at the sockets",
    "TCP payload that the kernel counted on the connections of the strategy's process groups (as `ss -ti` prints "
    "it), over whole windows of steps after the warm-up ÷ the number of steps. TCP headers and retransmissions are "
    "not included.",
)
INTERFACE_BYTES = Definition(
    "interface_bytes",
    "On the interface",
    "Bytes per step on the network interface of the rank's host, for all ranks of that host. Headers, "
    "acknowledgements and traffic of other programs are included.",
)
SPEED_UP = Definition(
    "speed_up",
    "Speed-up",
    "Samples per second ÷ those of the baseline, paired by repeat. T₁ is the baseline's time per step, T_N that on "
    "N ranks. In strong scaling, where the batch is the same, the speed-up is T₁/T_N; in weak scaling it is "
    "N·T₁/T_N, since N ranks train N times the samples in a step.",
)
EFFICIENCY = Definition(
    "efficiency",
    "Efficiency",
    "Speed-up ÷ the number of ranks N: in strong scaling E = T₁/(N·T_N) at a fixed global batch, in weak scaling E "
    "= T₁/T_N at a fixed batch per rank. It is claimed only where every rank had the same compute resources as the "
    "baseline.",
)

TERMS = (
    Definition(
        "strategy",
        "Strategy",
        "The way in which ranks agree on the gradient. A candidate is a strategy that you can pick. A bound "
        "exchanges nothing, so you cannot pick it: it shows how fast the ranks would be without communication. The "
        "baseline trains in one process.",
    ),
    Definition(
        "interval",
        "Interval",
        "95% confidence interval, by Student's t over repeats. Steps of one run are correlated, so they do not "
        "count as independent measurements. Times and ratios are treated as logarithms. Their variance between "
        "repeats is combined with that between the windows of a run and, for ratios, with that of the other "
        "candidates, unless these contradict it. Fewer than three repeats give no interval; of two, both values are "
        "shown.",
    ),
    Definition(
        "rank",
        "Rank",
        "One of the processes that train together, numbered from 0.",
    ),
    Definition(
        "host",
        "Host",
        "One of the machines that the ranks run on, numbered from 0.",
    ),
    Definition(
        "lossless",
        "Lossless",
        "A strategy that promises the same mean gradient as one process on the same batch, up to rounding.",
    ),
    Definition(
        "parity",
        "Parity error",
        "‖g − g₀‖ ÷ ‖g₀‖ over all gradients as one vector: g is the gradient that the strategy passes to the "
        "optimiser, g₀ the mean gradient of one process that computes the same shards one after the other. The "
        "largest value over the steps checked.",
    ),
    Definition(
        "measuring_cost",
        "Cost of measuring",
        "CPU time of all threads in steps with events ÷ that in steps without, minus one. Blocks of steps with and "
        "without events alternate, on the same data. The value is the median over pairs of blocks, with its 95% "
        "interval.",
    ),
)
"""Terms of every page."""
COMPARISON_TERMS = (
    Definition(
        "loss_difference",
        "Relative difference",
        "Difference of two losses of the same step and seed ÷ the larger one. Rounding depends on the order in "
        "which numbers are added, and training amplifies it, so the losses of correct lossless runs may differ.",
    ),
    Definition(
        "sampler_share",
        "Cost of sampling",
        "CPU time of the thread that samples CPU and memory ÷ wall time. It samples every half second, and less "
        "often where that would take more than 0.4% of a core.",
    ),
    Definition(
        "wall",
        "Wall time",
        "Training time since the start of the first step: wall time of the windows, without the reporting between "
        "them.",
    ),
)
RUN_TERM = Definition(
    "run",
    "Run",
    "One training from the start of its ranks. All runs have the same settings and differ in the seed.",
)
SEED_TERM = Definition(
    "seed",
    "Seed",
    "Number that determines the initial weights, the order of the data and the augmentation of a run.",
)
BATCH_TERM = Definition(
    "batch",
    "Batch",
    "Samples of all ranks together in one update of the weights.",
)
REMEDIES_TERM = Definition(
    "remedies",
    "Batch and remedies",
    "What is trained: the reference; a large batch with the settings of the reference (plain); or a large batch with "
    "the changes that are named.",
)
SCALING_TERMS = (
    Definition(
        "baselines",
        "Baselines",
        "single is one process without any strategy, with the cores of one host. Itself is the same strategy on "
        "one rank, where it sends nothing: the time it takes beyond single is the overhead of the strategy.",
    ),
    Definition(
        "oversubscribed",
        "No speed-up claimed",
        "Ranks without a core each run in turns, so their times say nothing about more machines. This does not "
        "apply to emulated hosts with a fixed share of the cores (--host-cpus).",
    ),
)
