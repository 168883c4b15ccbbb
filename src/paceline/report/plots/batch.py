"""Plots over batch sizes: time and throughput, communication, resources, and the time split of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from paceline.analysis.batch.points import BatchCurve, BatchPoint, BatchSizes
from paceline.analysis.statistics import Estimate
from paceline.analysis.steps.split import PARTS
from paceline.formatting import ACCURACY, FACTOR, FLOP_RATES, SHARE, SIZES, TIMES, WHOLE, Format, unit_for, whole
from paceline.records.experiment.design import Candidate
from paceline.records.summary import Split
from paceline.report.batch_verdict import format_curve, format_place
from paceline.report.plots.drawing import Json, base_layout, short_names
from paceline.report.plots.end_labels import AxisScale
from paceline.report.plots.line_panels import (
    PanelAxis,
    PanelLine,
    label_px,
    line_shifts,
    on_panel,
    panel_layout,
    panel_traces,
    value_scale,
)
from paceline.report.plots.palette import PARTS as COLOURS
from paceline.report.plots.palette import colours
from paceline.report.plots.scaling_split import NARROW_ROOM, split_base_layout
from paceline.report.plots.split import GAP, LABEL_ROOM, NAMES, StackedBar, bar_layout, bar_traces

LONGEST_NAME = 22
BAR_HEIGHT = 24
Read = Callable[[BatchPoint], Estimate | float | None]


@dataclass(frozen=True)
class _Quantity:
    """Quantity that one panel shows."""

    title: str
    format: Format
    read: Read


TIME_PANELS = (
    _Quantity("Samples per second", WHOLE, lambda point: point.row.samples_per_s),
    _Quantity("Time per epoch", TIMES, lambda point: point.epoch_s),
    _Quantity("Epoch without data loading", TIMES, lambda point: point.epoch_without_data_s),
    _Quantity("Speed-up over the fewest ranks", FACTOR, lambda point: point.speed_up),
)
COMMUNICATION_PANELS = (
    _Quantity("Computation per epoch", TIMES, lambda point: point.epoch_computing_s),
    _Quantity("Communication per epoch", TIMES, lambda point: point.epoch_communicating_s),
    _Quantity("Bandwidth utilisation", SHARE, lambda point: point.utilisation),
    _Quantity("Link use", SHARE, lambda point: point.link_share),
)
RESOURCE_PANELS = (
    _Quantity("Peak memory of a rank", SIZES, lambda point: point.row.peak_bytes),
    _Quantity("CPU use", SHARE, lambda point: point.cpu_share),
    _Quantity("Model FLOP/s", FLOP_RATES, lambda point: point.flop_per_s),
    _Quantity("MFU", ACCURACY, lambda point: point.mfu),
)
TRAINING_PANELS = (
    _Quantity("Test accuracy, at the end", ACCURACY, lambda point: point.row.test_accuracy),
    _Quantity("Training accuracy, equal time", ACCURACY, lambda point: point.equal_time_accuracy),
    _Quantity("Training loss, at the end", FACTOR, lambda point: point.end_loss),
    _Quantity("Training loss, equal time", FACTOR, lambda point: point.equal_time_loss),
)


def curve_colours(found: BatchSizes) -> dict[str, str]:
    """Return a colour per curve, by its name, the same in all plots and tables."""
    return colours([_as_candidate(curve) for curve in found.curves])


def curve_name(curve: BatchCurve) -> str:
    """Return the name of a curve."""
    return format_curve(curve)


def _as_candidate(curve: BatchCurve) -> Candidate:
    return Candidate(curve_name(curve), curve.strategy, role=curve.points[0].candidate.role)


def panels_figure(found: BatchSizes, title: str, quantities: Sequence[_Quantity]) -> Json | None:
    """Return a plot with a panel per quantity that was measured; None where none was."""
    sizes = sorted({point.size for point in found.points if point.row.is_measured})
    if not sizes:
        return None
    across = AxisScale(sizes[0] / 1.15, sizes[-1] * 1.35, logarithmic=True)
    shown = [(quantity, lines) for quantity in quantities if (lines := _lines(found, quantity))]
    if not shown:
        return None
    panels, sets = [], []
    for number, (quantity, lines) in enumerate(shown):
        unit, scale = lines[0].unit, value_scale(lines)
        is_share = unit.name == "%"
        name = f", {unit.name}" if unit.name and (scale.logarithmic or not is_share) else ""
        panels.append(PanelAxis(f"{quantity.title}{name}", scale, is_share=is_share))
        sets.append(on_panel(number, panel_traces(lines, scale, across, sizes)))
    names = short_names([curve_name(curve) for curve in found.curves], LONGEST_NAME)
    room, across_title = label_px(list(names.values())), "batch per rank" if found.design.per_rank else "global batch"
    axes = [["y", "y2", "y3", "y4"][number] for number in range(len(sets))]
    view = {
        "group": "",
        "label": title,
        "sets": [[number, own] for number, own in enumerate(axes)],
        "layout": panel_layout(panels, across, across_title, sizes, room, min(2, len(panels))),
        "medium": panel_layout(panels, across, across_title, sizes, room, 1),
    }
    return {
        "title": title,
        "data": [],
        "sets": sets,
        "views": [view],
        "layout": base_layout(0) | {"hovermode": "closest"},
    }


def _lines(found: BatchSizes, quantity: _Quantity) -> list[PanelLine]:
    """Return a line per curve that has values."""
    names = short_names([curve_name(curve) for curve in found.curves], LONGEST_NAME)
    tints, shifts = curve_colours(found), line_shifts([True] * len(found.curves))
    known = [
        [(point, own) for point in curve.points if point.row.is_measured and (own := _estimate(quantity, point))]
        for curve in found.curves
    ]
    unit = unit_for([own.value for points in known for _, own in points], quantity.format)
    return [
        PanelLine(
            label=names[curve_name(curve)],
            colour=tints[curve_name(curve)],
            dash="solid",
            places=[point.size for point, _ in points],
            values=[own for _, own in points],
            unit=unit,
            names=[f"batch {whole(point.batch)} on {format_place(point)}" for point, _ in points],
            remarks=[point.oversubscribed for point, _ in points],
            shift=shift,
        )
        for curve, points, shift in zip(found.curves, known, shifts, strict=True)
        if points
    ]


def _estimate(quantity: _Quantity, point: BatchPoint) -> Estimate | None:
    value = quantity.read(point)
    return value if value is None or isinstance(value, Estimate) else Estimate(value, None, None, 1)


def epoch_split_figure(found: BatchSizes) -> Json | None:
    """Return a bar per point with the parts of an epoch, by curve; None where no events were recorded."""
    bars = _bars(found)
    if not bars:
        return None
    unit = unit_for([bar.split.step_s for bar in bars], TIMES)
    return {
        "title": "Time split of an epoch",
        "data": bar_traces(bars, unit, "epoch"),
        "layout": split_base_layout() | bar_layout(bars, unit, BAR_HEIGHT, LABEL_ROOM, "epoch"),
        "narrow": split_base_layout() | bar_layout(bars, unit, BAR_HEIGHT, NARROW_ROOM, "epoch"),
        "keys": [{"label": NAMES[part], "colour": COLOURS[part], "hollow": False} for part in PARTS],
    }


def _bars(found: BatchSizes) -> list[StackedBar]:
    names = short_names([curve_name(curve) for curve in found.curves], LONGEST_NAME)
    bars: list[StackedBar] = []
    place = 0.0
    for curve in found.curves:
        first = True
        for point in curve.measured:
            if point.row.split is None or point.epoch_s is None:
                continue
            label = f"{names[curve_name(curve)]}  {whole(point.batch)}" if first else whole(point.batch)
            split = _scaled(point.row.split.mean, point.epoch_s.value)
            bars.append(StackedBar(label, f"batch {whole(point.batch)} on {format_place(point)}", place, split))
            place, first = place + 1, False
        place += 0.0 if first else GAP
    return bars


def _scaled(split: Split, epoch_s: float) -> Split:
    """Return the split of a step as that of an epoch, with the same shares."""
    by = epoch_s / split.step_s
    times = {name: value * by for name, value in msgspec.structs.asdict(split).items() if value is not None}
    return msgspec.structs.replace(split, **times)
