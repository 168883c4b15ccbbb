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
        "Median time per iteration",
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
    "split_step_s": Definition(
        "Mean step",
        "Mean length of a rank's own steps after the warm-up of five, over ranks and repeats; where ranks do not step "
        "together, a rank counts as often as it has steps. The time split adds up to it. The time per iteration is a "
        "median of windows instead, which a few slow steps do not move, and has in it what goes on between two steps.",
    ),
    "split_compute": Definition(
        "Compute",
        "Let C be the union of a step's compute intervals on a rank (forward, backward until the last gradient is "
        "ready, optimiser; without the moments at which the thread only waits for an operation), and K that of its "
        "communication intervals. Compute alone is |C| − |C∩K|.",
    ),
    "split_overlapped": Definition(
        "Overlapped", "|C∩K|: computing and communicating at once. See Compute for C and K."
    ),
    "split_exposed": Definition(
        "Exposed",
        "|K| − |C∩K|: communicating while nothing is computed, so that the step is longer for it. Waiting for a rank "
        "that comes late is part of it. See Compute for C and K.",
    ),
    "split_other": Definition(
        "Other",
        "Step − |C∪K|: neither computing nor communicating. Getting the batch, the strategy's own arithmetic and "
        "copies, Python.",
    ),
    "split_data": Definition(
        "Data", "Getting the batch: gathering, augmenting, moving it to the device. Part of Other."
    ),
    "split_descheduled": Definition(
        "Stolen",
        "Wall time minus CPU time of the computing thread inside what it computes: it would have run, but had no core. "
        "Part of Compute and Overlapped. Unknown on a GPU.",
    ),
    "overlap": Definition(
        "Overlap",
        "|C∩K| ÷ |K|: the share of communication that is hidden behind computing; undefined if nothing is sent, as by "
        "one rank alone.",
    ),
    "above_bound": Definition(
        "Above the bound",
        "The share of the step that goes away when nothing is exchanged: 1 − the bound's time ÷ this one's, paired "
        "by repeat. Communication that overlaps with compute is not in it, but for the cores that it takes.",
    ),
    "transfer": Definition(
        "Transfer",
        "The least duration of an operation over the ranks: that of the rank that came last, and waited for nobody. "
        "Where there is a root, or only two take part: from the moment when the last of those that it needs has come. "
        "Told of isolated operations only.",
    ),
    "wait": Definition(
        "Wait",
        "From the moment at which a rank comes to an operation until those that it depends on have come, by the ranks' "
        "common clock: of a step, as far as the rank computes nothing meanwhile; of a kind of operation, the mean of "
        "isolated ones, where it is what a rank's own duration is beyond the transfer.",
    ),
    "waited_for": Definition(
        "Is waited for",
        "The share of all waiting of the other ranks that was for this one. While it waits itself, "
        "the one that it waits for is to blame.",
    ),
    "isolated": Definition(
        "Isolated",
        "The share of operations during which none of their ranks had another under way. An asynchronous operation "
        "starts when it is enqueued, not when it is on the wire: what overlaps another says nothing about the link.",
    ),
    "operations": Definition("Operations", "How many a rank takes part in, in one step."),
    "operation_bytes": Definition(
        "Size", "S: bytes of the tensor; for gather, scatter, all_gather and reduce_scatter the total over all ranks."
    ),
    "operation_s": Definition("Time of an operation", "From its start to its end on a rank, waits included; the mean."),
    "algbw": Definition("algbw", "Algorithm bandwidth: S ÷ the time of transfer."),
    "busbw": Definition(
        "busbw",
        "Bus bandwidth, which can be held against a link: algbw × 2(n−1)/n for all_reduce, × (n−1)/n for "
        "reduce_scatter, all_gather, gather and scatter, × 1 for broadcast, reduce and messages, on n ranks.",
    ),
    "utilisation": Definition(
        "Utilisation", "busbw ÷ the point-to-point bandwidth of the narrowest link that the doctor measured."
    ),
    "measuring_cost": Definition(
        "Cost of measuring",
        "Processor time of all threads in steps with events ÷ that in steps without, less one: blocks of steps in "
        "turn, on the same data; the median over pairs of blocks, with its 95% interval.",
    ),
    "sent_kinds": Definition(
        "What is sent",
        "Bytes that the rank that sends most puts on the wire in one step, by what they carry: the operations that "
        "were seen, and how Gloo carries them out.",
    ),
    "socket_bytes": Definition(
        "Bytes at the sockets",
        "Payload of TCP, as the kernel counts it on the connections of the strategy's own groups (what `ss -ti` "
        "prints), over whole windows of steps after the warm-up ÷ their number. Headers of TCP and what had to be sent "
        "again are not in it.",
    ),
    "socket_plan": Definition(
        "Tensors by the plan",
        "What the strategy's plan says that tensors take; without a plan, what the operations that were seen take, as "
        "Gloo carries them out.",
    ),
    "framing_bytes": Definition(
        "Framing",
        "What Gloo adds: 96 bytes for each message on the side that sends, 48 on the side that receives. Collectives "
        "are made of many messages, so small tensors carry much of it.",
    ),
    "socket_proof": Definition(
        "Proof of bytes",
        "Bytes at the sockets ÷ (plan + framing). It holds where that is within 1% of one for every pair of ranks.",
    ),
    "retransmitted_bytes": Definition("Sent again", "Payload that the kernel had to send again, as after a loss."),
    "interface_bytes": Definition(
        "On the interface",
        "What the network interface of the rank's host carried meanwhile, per step: headers, acknowledgements, and "
        "whatever else used it; for all ranks of that host.",
    ),
    "lower_bound": Definition(
        "Least for gradients",
        "An all-reduce of X numbers on n ranks must move at least ⌈2(n−1)/n·X⌉ × their size through the busiest rank. "
        "What is sent ÷ that counts gradients, and weights where these come back in their place.",
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
    "staleness": Definition(
        "Age of gradients",
        "Under an asynchronous strategy: how many updates a server has made since the weights that a gradient was "
        "computed with, when it comes. The mean over all gradients and servers; the median over repeats. Of n equally "
        "fast workers it is about n − 1.",
    ),
    "over_limit_share": Definition(
        "Late", "The share of gradients that were older than the strategy allows: damped or dropped, as it was told."
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
        "Mean step of a rank",
        "Mean time of the rank's own steps after the warm-up of five, those of the time split too; the median over "
        "repeats. It ends when the rank has nothing left to do, where the time per iteration of a strategy, a median, "
        "ends when nothing is in flight on any rank.",
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
    "device_bytes": Definition(
        "GPU memory", "What tensors take on the rank's GPU: the median of samples taken while it trained."
    ),
    "device_used_bytes": Definition(
        "GPU in use", "The most that was taken of that GPU's memory in all, by whomever, in any sample."
    ),
    "host": Definition("Host", "One of the machines that the ranks run on, numbered from 0."),
    "host_cpu_share": Definition("CPU of its ranks", "The sum of CPU over the ranks of the host: 200% is two cores."),
    "host_resident_bytes": Definition(
        "Memory of its ranks", "The sum of resident memory over its ranks; what they share is counted once for each."
    ),
    "host_used_bytes": Definition("Memory in use", "The most of the host's memory that was in use, by whomever."),
    "host_available_bytes": Definition(
        "Memory left", "The least of the host's memory that could still be had without swapping."
    ),
    "host_busy": Definition(
        "Host busy",
        "The share of its usable cores' time that was not idle, whoever used them: the mean while training.",
    ),
    "collections": Definition(
        "Collections",
        "Garbage collections of Python's own, which stop all of a rank's Python: those that look at every object, and "
        "others that take longer than a millisecond, while it trained.",
    ),
    "collection_s": Definition("Collecting", "The time that these garbage collections took, all together."),
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
