"""What every figure of a report means: the one source of its tooltips and of its last section."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """A figure's name and what it means."""

    term: str
    text: str


DEFINITIONS = {
    "strategy": Definition(
        "Strategy",
        "How the ranks agree on the gradient. A bound exchanges nothing, so it cannot be picked: it shows how fast "
        "the ranks would be without communication. The baseline trains in one process. All others are candidates.",
    ),
    "step_s": Definition(
        "Time per iteration",
        "Wall time of a window of steps, from the start of the first until nothing is in flight any more, on the "
        "slowest rank, ÷ the steps in it. The first window of a run is never counted. Per run the median over its "
        "windows, then the median over repeats.",
    ),
    "interval": Definition(
        "Interval",
        "95% confidence, by Student's t over repeats: the steps of one run are correlated, so counting them would "
        "promise a certainty that is not there. Times and ratios are handled as logarithms. One repeat gives no "
        "interval.",
    ),
    "ratio": Definition(
        "Ratio to the reference",
        "Time per sample ÷ the reference's, paired by repeat. With equal batches that is the ratio of the times per "
        "iteration; less than 1 is faster.",
    ),
    "exposed": Definition(
        "Exposed communication",
        "The share of the step that goes away when nothing is exchanged: 1 − the bound's time ÷ this one's, paired "
        "by repeat. Communication that overlaps with compute is not in it.",
    ),
    "busiest_sent_bytes": Definition(
        "Sent per step",
        "What the rank that sends most puts on the wire in one step, by the strategy's plan: gradients and "
        "broadcast buffers. 1 MB is a million bytes.",
    ),
    "samples_per_s": Definition(
        "Samples per second",
        "Samples trained by all ranks together ÷ time, from the same windows as the time per iteration.",
    ),
    "train_loss": Definition(
        "Train loss",
        "The loss summed over all samples trained ÷ their number, over the whole run; the median over repeats.",
    ),
    "test_loss": Definition(
        "Test loss",
        "Mean loss over the test data, of the agreed weights at the end of the run.",
    ),
    "test_accuracy": Definition(
        "Test accuracy",
        "Share of the test data that the agreed weights predict right at the end of the run. Each repeat has its "
        "own seed, shared by all strategies: differences count only beyond the spread between seeds.",
    ),
    "peak_bytes": Definition(
        "Peak memory",
        "The most memory that a rank held while training, on the rank that needed most. On a CPU it is the whole "
        "process, PyTorch itself included.",
    ),
    "rank": Definition("Rank", "One of the processes that train together, numbered from 0."),
    "samples": Definition(
        "Samples", "What the rank trained on in one run; samples seen in several epochs count again."
    ),
    "average_loss": Definition(
        "Average loss",
        "The loss summed over the samples that this rank trained ÷ their number; the median over repeats.",
    ),
    "accuracy": Definition(
        "Train accuracy", "Share of the samples that this rank trained that were predicted right at the time."
    ),
    "first_step_s": Definition(
        "First step",
        "The first step of a run also allocates memory, builds buckets and picks kernels, so no average contains it.",
    ),
    "rank_step_s": Definition(
        "Time per iteration of a rank",
        "Mean time of the rank's own steps without the first; the median over repeats. It ends when the rank has "
        "nothing left to do, where the time per iteration of a strategy ends when nothing is in flight on any rank.",
    ),
    "data_s": Definition("Data", "Getting the batch: gathering, augmenting, moving it to the device."),
    "forward_s": Definition("Forward", "The forward pass, with counting right answers."),
    "backward_s": Definition(
        "Backward", "The backward pass, with the waits for other ranks that happen inside it, as DDP's do."
    ),
    "update_s": Definition(
        "Update", "Agreeing on gradients where that follows the backward pass, clipping, and the optimiser."
    ),
    "sent_bytes": Definition("Sent", "What the rank puts on the wire in one step, by the strategy's plan."),
    "received_bytes": Definition("Received", "What the rank takes off the wire in one step, by the strategy's plan."),
    "parity": Definition(
        "Parity error",
        "‖g − g₀‖ ÷ ‖g₀‖ over all gradients as one vector: g is what the strategy hands to the optimiser, g₀ the "
        "mean gradient of one process that goes through the same shards one after the other. The largest over the "
        "steps checked.",
    ),
    "lossless": Definition(
        "Lossless", "A strategy that promises the same mean gradient as one process on the same batch, up to rounding."
    ),
    "parting": Definition(
        "Relative difference",
        "The difference of two losses of the same step and seed ÷ the larger one. Rounding differs with the order "
        "in which numbers are added, and training amplifies it, so lossless runs may part without any of them being "
        "wrong.",
    ),
    "cpu_share": Definition(
        "CPU",
        "CPU time of all threads of the rank's process, in user and in system mode, ÷ wall time, from the start of its "
        "first step to the end of its last. 100% is one core all the time. Processes that a data loader of one's own "
        "starts are not in it.",
    ),
    "resident_bytes": Definition(
        "Resident memory", "What the rank's process has in RAM: the median of samples taken while it trained."
    ),
    "host_busy": Definition(
        "Host busy",
        "The share of its usable cores' time that was not idle, whoever used them: the mean while training.",
    ),
    "collections": Definition(
        "Garbage collections",
        "Python's own, which stop all of a rank's Python: those that look at every object, and others that take longer "
        "than a millisecond.",
    ),
    "sampler_share": Definition(
        "Cost of sampling",
        "CPU time of the thread that samples CPU and memory, ÷ wall time. It samples every half second, and less often "
        "where that would take more than half a per cent of a core.",
    ),
    "profile_share": Definition(
        "Share of an operator",
        "Its own time ÷ that of all operators, under torch's profiler, on the steps that `--profile` names: on the GPU "
        "where one does the work, else on the CPU.",
    ),
    "profile_calls": Definition("Calls", "How often an operator was called in a step, by the profiler's count."),
    "profile_self_cpu_s": Definition(
        "Self CPU", "Time per step in the operator on the CPU, waits included, without that in operators it called."
    ),
    "profile_cpu_s": Definition("Total CPU", "The same with the operators that it called."),
    "profile_self_device_s": Definition(
        "Self GPU", "Time per step of the GPU's kernels that the operator itself asked for."
    ),
    "profile_device_s": Definition("Total GPU", "The same with the operators that it called."),
    "wall": Definition(
        "Wall time",
        "Training time since the first step began: the windows' wall time, without the reporting between them.",
    ),
}
"""By the name of the figure in the code."""
