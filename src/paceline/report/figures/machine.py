"""Figures of the tables on the machine: resource use of hosts, and time per operator."""

from __future__ import annotations

from paceline.analysis.resources import HostUsage
from paceline.formatting import COUNTS, SHARE, SIZES, TIMES, percent_unit
from paceline.report.definitions import Definition
from paceline.report.figures.figure import Figure, InTerminal, figures_of_part
from paceline.report.tables.profile import ProfileRow
from paceline.report.tables.resources import HostRow

_OF_USAGE: tuple[Figure[HostUsage], ...] = (
    Figure(
        key="busy",
        heading="Busy",
        format=SHARE,
        definition=Definition(
            "host_busy",
            "Host busy",
            "Share of its usable cores' time that was not idle, by all processes: the mean during training.",
        ),
    ),
    Figure(
        key="cpu_share",
        heading="CPU of its ranks",
        format=SHARE,
        definition=Definition(
            "host_cpu_share",
            "CPU of its ranks",
            "Sum of CPU over the ranks of the host: 200% is two cores.",
        ),
    ),
    Figure(
        key="resident_bytes",
        heading="Memory of its ranks",
        format=SIZES,
        definition=Definition(
            "host_resident_bytes",
            "Memory of its ranks",
            "Sum of resident memory over its ranks; shared memory counts once per rank.",
        ),
    ),
    Figure(
        key="used_bytes",
        heading="Memory in use",
        format=SIZES,
        definition=Definition(
            "host_used_bytes",
            "Memory in use",
            "Highest use of the host's memory, by all processes.",
        ),
    ),
    Figure(
        key="available_bytes",
        heading="Memory available",
        format=SIZES,
        definition=Definition(
            "host_available_bytes",
            "Memory available",
            "Lowest amount of the host's memory that was available without swapping.",
        ),
    ),
)

HOST_FIGURES: tuple[Figure[HostRow], ...] = figures_of_part("usage", _OF_USAGE)

OPERATOR_FIGURES: tuple[Figure[ProfileRow], ...] = (
    Figure(
        key="calls",
        heading="Calls",
        format=COUNTS,
        definition=Definition(
            "profile_calls",
            "Calls",
            "Calls of the operator per step, by torch's profiler.",
        ),
        terminal=InTerminal("calls/step", 10),
    ),
    Figure(
        key="share",
        heading="Share",
        format=percent_unit(1),
        definition=Definition(
            "profile_share",
            "Share of an operator",
            "Its own time ÷ that of all operators, by torch's profiler, in the steps that `--profile` names: "
            "GPU time where a GPU does the work, else CPU time.",
        ),
        terminal=InTerminal("share", 10),
    ),
    Figure(
        key="self_cpu_s",
        heading="Self CPU",
        format=TIMES,
        definition=Definition(
            "profile_self_cpu_s",
            "Self CPU",
            "CPU time per step in the operator itself, including waiting, without the operators it called.",
        ),
        unit_of="self_s",
        terminal=InTerminal("self CPU", 10),
    ),
    Figure(
        key="cpu_s",
        heading="Total CPU",
        format=TIMES,
        definition=Definition(
            "profile_cpu_s",
            "Total CPU",
            "CPU time per step in the operator and in the operators it called.",
        ),
        unit_of="self_s",
        terminal=InTerminal("total CPU", 10),
    ),
    Figure(
        key="self_device_s",
        heading="Self GPU",
        format=TIMES,
        definition=Definition(
            "profile_self_device_s",
            "Self GPU",
            "GPU time per step of the kernels that the operator itself launched.",
        ),
        unit_of="self_s",
        terminal=InTerminal("self GPU", 10),
    ),
    Figure(
        key="device_s",
        heading="Total GPU",
        format=TIMES,
        definition=Definition(
            "profile_device_s",
            "Total GPU",
            "GPU time per step of the kernels that the operator and the operators it called launched.",
        ),
        unit_of="self_s",
        terminal=InTerminal("total GPU", 10),
    ),
)
