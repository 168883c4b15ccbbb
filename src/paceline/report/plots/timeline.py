"""Plot of typical steps on one clock: a row per rank, with its computing and its communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from paceline.analysis.comparison import Comparison
from paceline.analysis.steps.activity import ACTIVITIES, WAITING
from paceline.formatting import TIMES, Ladder, Unit, seconds, size, unit_for
from paceline.records.timeline import RowKind
from paceline.report.plots.drawing import (
    Json,
    Panel,
    axis,
    base_layout,
    heading,
    hover_value,
    numbered,
    plain,
    short_names,
    side_note,
)
from paceline.report.plots.palette import OPERATIONS, PHASES
from paceline.report.plots.timeline_steps import (
    COMMUNICATION_PLACE,
    COMPUTE_PLACE,
    MEDIAN,
    TimelineBar,
    TimelineStep,
    thinned,
    typical_steps,
)

MOST_BARS = 4500
"""Most bars in all steps on all ranks; of more, those closest to each other are merged."""
MOST_ROWS = 40
"""Most ranks in the view of all candidates; where there would be more, it shows only the best candidates."""
UNITS = Ladder(TIMES.units[:2])
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds"}
WAITING_LABEL = "waiting for communication"

ROW_HEIGHT, GAP_HEIGHT, TOP, BOTTOM = 46, 34, 30, 46
"""Heights in pixels: of a rank with both of its lines, between two candidates, and of the margins."""
SMALL_ROW_HEIGHT = 28
"""Height of a rank where several candidates are drawn at once."""
LEFT = 74


def timeline(comparison: Comparison) -> Json | None:
    """Return the plot, with a view of all candidates and two of each; None where no timelines were recorded."""
    timeline_steps = [
        timeline_step for row in comparison.rows for timeline_step in typical_steps(comparison, row.candidate)
    ]
    if not timeline_steps:
        return None
    timeline_steps = [thinned(timeline_step, MOST_BARS // len(timeline_steps)) for timeline_step in timeline_steps]
    unit = unit_for([timeline_step.length_s for timeline_step in timeline_steps], UNITS)
    names = short_names([candidate.name for candidate in comparison.record_set.candidates])
    overview = _overview(timeline_steps)
    chosen = [*([overview] if len(overview) > 1 else []), *[[number] for number in range(len(timeline_steps))]]
    views = [_view(timeline_steps, numbers, names, unit) for numbers in chosen]
    return {
        "title": "Typical steps, rank by rank",
        "sets": [list(_traces(timeline_step, unit)) for timeline_step in timeline_steps],
        "data": [],
        "views": views,
        "layout": base_layout(0, left=LEFT, right=8, top=TOP, bottom=BOTTOM) | {"barmode": "overlay"},
        "keys": _keys(timeline_steps),
        "zoom": True,
    }


def _overview(timeline_steps: Sequence[TimelineStep]) -> list[int]:
    """Return the indices of the median steps of the best candidates, as many as fit."""
    medians = [number for number, timeline_step in enumerate(timeline_steps) if timeline_step.which == MEDIAN]
    rows = [sum(len(timeline_steps[number].ranks) for number in medians[: count + 1]) for count in range(len(medians))]
    return [number for number, above in zip(medians, rows, strict=True) if above <= MOST_ROWS]


def _traces(timeline_step: TimelineStep, unit: Unit) -> Iterator[Json]:
    """Yield a trace per kind of bar."""
    kinds: dict[tuple[str, str], list[TimelineBar]] = defaultdict(list)
    for bar in timeline_step.bars:
        kinds[bar.what, bar.purpose].append(bar)
    for (what, purpose), bars in kinds.items():
        named = f"{what} of {purpose}" if purpose else WAITING_LABEL if what == WAITING else what
        trace = {
            "type": "bar",
            "orientation": "h",
            "base": [_scaled(unit, bar.start_s) for bar in bars],
            "x": [_scaled(unit, bar.end_s - bar.start_s) for bar in bars],
            "y": [round(bar.place, 3) for bar in bars],
            "width": _one_if_equal([round(bar.thickness, 3) for bar in bars]),
            "marker": _marker(what),
            "meta": plain(named),
            "customdata": [_tooltip_parts(bar, timeline_step.ranks) for bar in bars],
            "hovertemplate": "%{customdata[0]}: %{meta}%{customdata[1]}<br>%{customdata[2]}, starts at "
            f"{hover_value('base', unit)}<extra></extra>",
        }
        yield trace


def _marker(what: str) -> Json:
    """Return the fill of a bar; waiting is hatched, since nothing is computed in it."""
    colour = (PHASES | OPERATIONS)[what]
    if what != WAITING:
        return {"color": colour, "line": {"width": 0}}
    pattern = {"shape": "/", "fgcolor": colour, "bgcolor": f"{colour}1f", "size": 5, "solidity": 0.25}
    return {"color": f"{colour}1f", "line": {"width": 0}, "pattern": pattern}


def _tooltip_parts(bar: TimelineBar, ranks: Sequence[int]) -> list[str]:
    """Return the parts of a bar's tooltip: its rank; its bytes and peer; its duration."""
    carried = [f"{bar.merged} ×"] if bar.merged > 1 else []
    carried += [size(bar.bytes)] if bar.purpose else []
    carried += [bar.peer] if bar.peer else []
    details = "".join(f", {part}" for part in carried)
    return [f"rank {ranks[round(bar.place)]}", details, seconds(bar.end_s - bar.start_s)]


def _scaled(unit: Unit, value_s: float) -> float:
    """Return a time in the plot's unit, rounded to a microsecond, or to 10 µs where the unit is a second."""
    return round(value_s / unit.scale, 3 if unit.scale < 1 else 5)


def _one_if_equal(values: list[float]) -> float | list[float]:
    return values[0] if len(set(values)) == 1 else values


def _keys(timeline_steps: Sequence[TimelineStep]) -> list[Json]:
    """Return the legend of the colours that occur; kinds that share a colour share an entry."""
    seen = {bar.what for timeline_step in timeline_steps for bar in timeline_step.bars}
    found: dict[str, Json] = {}
    for what in (*ACTIVITIES, *[kind.title for kind in RowKind if kind.is_operation]):
        if what not in seen:
            continue
        colour = (PHASES | OPERATIONS)[what]
        key = f"{colour}{what == WAITING}"
        label = f"{found[key]['label']} / {what}" if key in found else what
        found[key] = {"label": label, "colour": colour, "hollow": what == WAITING}
    return list(found.values())


def _view(timeline_steps: Sequence[TimelineStep], numbers: Sequence[int], names: dict[str, str], unit: Unit) -> Json:
    """Return a view of some steps below each other, on one scale."""
    shown = [timeline_steps[number] for number in numbers]
    first, alone = shown[0], len(shown) == 1
    complete = len(shown) == sum(timeline_step.which == MEDIAN for timeline_step in timeline_steps)
    return {
        "group": names[first.candidate.name] if alone else "All" if complete else f"Best {len(shown)}",
        "label": first.which if alone else "median steps",
        "sets": [[number, numbered("y", place)] for place, number in enumerate(numbers)],
        "layout": _layout(shown, names, ROW_HEIGHT if alone else SMALL_ROW_HEIGHT, unit),
    }


def _layout(timeline_steps: Sequence[TimelineStep], names: dict[str, str], row_height: int, unit: Unit) -> Json:
    heights = [row_height * len(timeline_step.ranks) for timeline_step in timeline_steps]
    inside = sum(heights) + GAP_HEIGHT * (len(timeline_steps) - 1)
    # One process may take much longer than distributed training: then it is cut off, so that the others are visible.
    distributed = [step.length_s for step in timeline_steps if step.candidate.role != "baseline"]
    longest_s = max(distributed or [timeline_step.length_s for timeline_step in timeline_steps])
    layout: Json = {"height": inside + TOP + BOTTOM, "annotations": []}
    layout["xaxis"] = axis(
        f"{UNIT_NAMES[unit.name]} since the start of the step",
        range=[0, _scaled(unit, 1.01 * longest_s)],
        fixedrange=False,
        nticks=10,
    )
    layout["xaxis"]["anchor"] = numbered("y", len(timeline_steps) - 1)
    top = inside
    for place, (timeline_step, height) in enumerate(zip(timeline_steps, heights, strict=True)):
        panel = Panel((0, 1), ((top - height) / inside, top / inside))
        top -= height + GAP_HEIGHT
        layout[numbered("yaxis", place)] = _rank_axis(timeline_step, panel)
        layout["annotations"] += [
            heading(plain(names[timeline_step.candidate.name]), panel, raised=4),
            side_note(f"step {timeline_step.step}, {seconds(timeline_step.longest_s)}", panel, raised=4),
        ]
    return layout


def _rank_axis(timeline_step: TimelineStep, panel: Panel) -> Json:
    count = len(timeline_step.ranks)
    return axis(
        domain=panel.y,
        anchor="x",
        range=[count - 0.5, -0.5],
        showgrid=False,
        tickvals=[row + place for row in range(count) for place in (COMPUTE_PLACE, COMMUNICATION_PLACE)],
        ticktext=[text for rank in timeline_step.ranks for text in (f"rank {rank} ", "comm ")],
        tickfont={"size": 10.5, "color": "@muted"},
    )
