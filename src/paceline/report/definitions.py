"""Definitions of every figure in a report: the source of the tooltips and of the page's last section."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """Name of a figure, and its definition."""

    term: str
    text: str


DEFINITIONS = {
    "strategy": Definition(
        "Strategy",
        "The way in which ranks agree on the gradient. A candidate is a strategy that you can pick. A bound exchanges "
        "nothing, so you cannot pick it: it shows how fast the ranks would be without communication. The baseline "
        "trains in one process.",
    ),
    "step_s": Definition(
        "Median time per step",
        "Wall time of a window of steps on the slowest rank ÷ the number of steps in it. A window starts with its "
        "first step and ends when no communication is in progress any more. The first window of a run is never "
        "counted. The value is the median over the windows of a run, then the median over repeats.",
    ),
    "interval": Definition(
        "Interval",
        "95% confidence interval, by Student's t over repeats. Steps of one run are correlated, so they do not count "
        "as independent measurements. Times and ratios are treated as logarithms. One repeat gives no interval.",
    ),
    "ratio": Definition(
        "Ratio to the reference",
        "Time per sample ÷ that of the reference, paired by repeat. With equal batches it is the ratio of the times "
        "per step. Less than 1 is faster.",
    ),
    "split_step_s": Definition(
        "Mean step",
        "Mean length of a rank's own steps after five warm-up steps, over ranks and repeats. Where ranks do not step "
        "together, a rank with more steps counts more. The parts of the time split add up to it. The time per step in "
        "the first table differs: it is a median of windows, so a few slow steps do not change it, and it includes the "
        "time between steps.",
    ),
    "split_compute": Definition(
        "Compute",
        "Time of a step in which the rank computes and no communication is in progress. Computing is the forward pass, "
        "the backward pass until the last gradient is ready, and the optimiser, without the time in which the thread "
        "only waits for communication.",
    ),
    "split_overlapped": Definition(
        "Overlapped",
        "Time of a step in which the rank computes while communication is in progress. This communication is hidden: "
        "it does not make the step longer by itself.",
    ),
    "split_exposed": Definition(
        "Exposed",
        "Time of a step in which communication is in progress and the rank computes nothing. It makes the step longer. "
        "Waiting for a rank that arrives late is part of it.",
    ),
    "split_other": Definition(
        "Other",
        "Time of a step in which the rank neither computes nor communicates: loading the batch, the strategy's own "
        "arithmetic and copies, Python overhead.",
    ),
    "split_data": Definition(
        "Data", "Loading the batch: gathering, augmenting and moving it to the device. Part of Other."
    ),
    "split_descheduled": Definition(
        "Descheduled",
        "Wall time minus CPU time of the compute thread while it computes: time in which it had no core, or slept. "
        "Part of Compute and Overlapped. Unknown on a GPU.",
    ),
    "overlap": Definition(
        "Overlap",
        "Overlapped ÷ (overlapped + exposed): the share of communication time that is hidden behind computing. "
        "Undefined if nothing is sent, for example on a single rank.",
    ),
    "above_bound": Definition(
        "Above the bound",
        "Share of the step that is saved when nothing is exchanged: 1 − the bound's time ÷ this strategy's time, "
        "paired by repeat. Communication that overlaps with computing does not count, except for the cores that it "
        "uses.",
    ),
    "transfer": Definition(
        "Transfer",
        "Shortest duration of an operation over its ranks: that of the rank that arrived last and so did not wait. For "
        "operations with a root or between two ranks: the time from the arrival of the last rank that is needed. "
        "Reported for isolated operations only.",
    ),
    "wait": Definition(
        "Wait",
        "Time from a rank's arrival at an operation until the ranks that it depends on have arrived, by a clock common "
        "to all ranks. For a step: only while the rank computes nothing. For a kind of operation: the mean over "
        "isolated ones, which is the rank's own duration minus the transfer.",
    ),
    "waited_for": Definition(
        "Waited for",
        "Share of the other ranks' total waiting time that was for this rank. While a rank waits itself, the waiting "
        "counts for the rank that it waits for.",
    ),
    "isolated": Definition(
        "Isolated",
        "Share of operations during which none of their ranks had another operation in progress. An asynchronous "
        "operation starts when it is enqueued, not when its bytes are sent, so the duration of overlapping operations "
        "says nothing about the link.",
    ),
    "operations": Definition("Operations", "Number of operations per step that a rank participates in."),
    "operation_bytes": Definition(
        "Size",
        "Bytes of the tensor (S); for gather, scatter, all_gather and reduce_scatter the total over all ranks.",
    ),
    "operation_s": Definition(
        "Time of an operation", "Mean time from its start to its end on a rank, including waiting."
    ),
    "algbw": Definition("algbw", "Algorithm bandwidth: size ÷ transfer time."),
    "busbw": Definition(
        "busbw",
        "Bus bandwidth, which can be compared with the bandwidth of a link: algbw × 2(n−1)/n for all_reduce, × (n−1)/n "
        "for reduce_scatter, all_gather, gather and scatter, × 1 for broadcast, reduce and messages, on n ranks.",
    ),
    "utilisation": Definition(
        "Utilisation", "busbw ÷ the point-to-point bandwidth of the slowest link that the doctor measured."
    ),
    "measuring_cost": Definition(
        "Cost of measuring",
        "CPU time of all threads in steps with events ÷ that in steps without, minus one. Blocks of steps with and "
        "without events alternate, on the same data. The value is the median over pairs of blocks, with its 95% "
        "interval.",
    ),
    "sent_kinds": Definition(
        "Bytes sent",
        "Bytes that the busiest rank sends in one step, by content. They are derived from the operations that were "
        "recorded and from the way Gloo carries them out.",
    ),
    "socket_bytes": Definition(
        "Bytes at the sockets",
        "TCP payload that the kernel counted on the connections of the strategy's process groups (as `ss -ti` prints "
        "it), over whole windows of steps after the warm-up ÷ the number of steps. TCP headers and retransmissions are "
        "not included.",
    ),
    "socket_plan": Definition(
        "Planned tensor bytes",
        "Bytes of tensors by the strategy's plan; without a plan, by the operations that were recorded and the way "
        "Gloo carries them out.",
    ),
    "framing_bytes": Definition(
        "Framing",
        "Bytes that Gloo adds: 96 per message on the sending side, 48 on the receiving side. A collective consists of "
        "many messages, so for small tensors the framing is a large part.",
    ),
    "socket_proof": Definition(
        "Proof of bytes",
        "Bytes at the sockets ÷ (planned tensor bytes + framing). The proof holds if the ratio is within 1% of one for "
        "every pair of ranks.",
    ),
    "retransmitted_bytes": Definition(
        "Retransmitted", "Payload that the kernel had to send again, for example after a packet loss."
    ),
    "interface_bytes": Definition(
        "On the interface",
        "Bytes per step on the network interface of the rank's host, for all ranks of that host. Headers, "
        "acknowledgements and traffic of other programs are included.",
    ),
    "lower_bound": Definition(
        "Minimum for gradients",
        "An all-reduce of X numbers on n ranks must move at least ⌈2(n−1)/n·X⌉ × their size through the busiest rank. "
        "Sent ÷ minimum counts gradients, and weights where a strategy returns weights instead of gradients.",
    ),
    "busiest_sent_bytes": Definition(
        "Sent per step",
        "Bytes that the busiest rank sends in one step, by the strategy's plan: gradients and broadcast buffers. 1 MB "
        "is a million bytes.",
    ),
    "samples_per_s": Definition(
        "Samples per second",
        "Mean samples per step over all ranks ÷ the time per step (the median over windows).",
    ),
    "staleness": Definition(
        "Gradient staleness",
        "For asynchronous strategies: the number of updates a server has made since it sent the weights that a "
        "gradient was computed with. The mean over all gradients and servers, then the median over repeats. With n "
        "equally fast workers it is about n − 1.",
    ),
    "over_limit_share": Definition(
        "Late gradients",
        "Share of gradients with a higher staleness than the strategy allows. They are damped or dropped, as "
        "configured.",
    ),
    "train_loss": Definition(
        "Train loss",
        "Loss summed over all samples trained ÷ their number, over the whole run; the median over repeats.",
    ),
    "test_loss": Definition(
        "Test loss",
        "Mean loss over the test data, of the synchronised weights at the end of the run.",
    ),
    "test_accuracy": Definition(
        "Test accuracy",
        "Share of the test data that the synchronised weights predict correctly at the end of the run. Each repeat has "
        "its own seed, shared by all strategies. Only differences larger than the spread between seeds count.",
    ),
    "peak_bytes": Definition(
        "Peak memory",
        "Highest memory use of a rank during training, on the rank that used most. On a CPU it is the whole process, "
        "including PyTorch itself.",
    ),
    "rank": Definition("Rank", "One of the processes that train together, numbered from 0."),
    "samples": Definition(
        "Samples", "Samples that the rank trained on in one run; samples of several epochs count once per epoch."
    ),
    "average_loss": Definition(
        "Average loss",
        "Loss summed over the samples that this rank trained ÷ their number; the median over repeats.",
    ),
    "accuracy": Definition(
        "Train accuracy",
        "Share of the samples this rank trained on that the model predicted correctly in the step that trained them.",
    ),
    "first_step_s": Definition(
        "First step",
        "The first step of a run also allocates memory, builds buckets and selects kernels, so no average includes it.",
    ),
    "rank_step_s": Definition(
        "Mean step of a rank",
        "Mean time of the rank's own steps after five warm-up steps, as in the time split; the median over repeats. A "
        "rank's step ends when the rank itself is done. The time per step of a strategy differs: it is a median, and "
        "its windows end when no rank has communication in progress.",
    ),
    "data_s": Definition("Data", "Loading the batch: gathering, augmenting and moving it to the device."),
    "forward_s": Definition("Forward", "The forward pass, including counting correct predictions."),
    "backward_s": Definition(
        "Backward", "The backward pass, including time spent waiting for other ranks inside it, as under DDP."
    ),
    "update_s": Definition(
        "Update", "Exchange of gradients where it follows the backward pass, clipping, and the optimiser."
    ),
    "sent_bytes": Definition("Sent", "Bytes that the rank sends in one step, by the strategy's plan."),
    "received_bytes": Definition("Received", "Bytes that the rank receives in one step, by the strategy's plan."),
    "parity": Definition(
        "Parity error",
        "‖g − g₀‖ ÷ ‖g₀‖ over all gradients as one vector: g is the gradient that the strategy passes to the "
        "optimiser, g₀ the mean gradient of one process that computes the same shards one after the other. The largest "
        "value over the steps checked.",
    ),
    "lossless": Definition(
        "Lossless", "A strategy that promises the same mean gradient as one process on the same batch, up to rounding."
    ),
    "loss_difference": Definition(
        "Relative difference",
        "Difference of two losses of the same step and seed ÷ the larger one. Rounding depends on the order in which "
        "numbers are added, and training amplifies it, so the losses of correct lossless runs may differ.",
    ),
    "cpu_share": Definition(
        "CPU",
        "CPU time of all threads of the rank's process, in user and system mode, ÷ wall time, from the start of its "
        "first step to the end of its last. 100% is one core all the time. Worker processes of a data loader are not "
        "included.",
    ),
    "resident_bytes": Definition(
        "Resident memory", "Memory of the rank's process in RAM: the median of samples taken during training."
    ),
    "device_bytes": Definition(
        "GPU memory", "Memory of tensors on the rank's GPU: the median of samples taken during training."
    ),
    "device_used_bytes": Definition(
        "GPU memory in use", "Highest total use of that GPU's memory, by all processes, in any sample."
    ),
    "host": Definition("Host", "One of the machines that the ranks run on, numbered from 0."),
    "host_cpu_share": Definition("CPU of its ranks", "Sum of CPU over the ranks of the host: 200% is two cores."),
    "host_resident_bytes": Definition(
        "Memory of its ranks", "Sum of resident memory over its ranks; shared memory counts once per rank."
    ),
    "host_used_bytes": Definition("Memory in use", "Highest use of the host's memory, by all processes."),
    "host_available_bytes": Definition(
        "Memory available", "Lowest amount of the host's memory that was available without swapping."
    ),
    "host_busy": Definition(
        "Host busy",
        "Share of its usable cores' time that was not idle, by all processes: the mean during training.",
    ),
    "collections": Definition(
        "GC runs (garbage collections)",
        "Python garbage collections during training, which stop all Python code of a rank: full collections, and "
        "others longer than a millisecond.",
    ),
    "collection_s": Definition("GC time", "Total time of these garbage collections."),
    "sampler_share": Definition(
        "Cost of sampling",
        "CPU time of the thread that samples CPU and memory ÷ wall time. It samples every half second, and less often "
        "where that would take more than 0.4% of a core.",
    ),
    "profile_share": Definition(
        "Share of an operator",
        "Its own time ÷ that of all operators, by torch's profiler, in the steps that `--profile` names: GPU time "
        "where a GPU does the work, else CPU time.",
    ),
    "profile_calls": Definition("Calls", "Calls of the operator per step, by torch's profiler."),
    "profile_self_cpu_s": Definition(
        "Self CPU", "CPU time per step in the operator itself, including waiting, without the operators it called."
    ),
    "profile_cpu_s": Definition("Total CPU", "CPU time per step in the operator and in the operators it called."),
    "profile_self_device_s": Definition(
        "Self GPU", "GPU time per step of the kernels that the operator itself launched."
    ),
    "profile_device_s": Definition(
        "Total GPU", "GPU time per step of the kernels that the operator and the operators it called launched."
    ),
    "wall": Definition(
        "Wall time",
        "Training time since the start of the first step: wall time of the windows, without the reporting between "
        "them.",
    ),
}
"""Definitions by the figure's name in the code."""
