"""Typical steps of every contender on one clock: ranks as rows, what each computed and what it had on the wire."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paceline.analysis.activity import ACTIVITIES, WAITING, StepActivity, step_activities
from paceline.analysis.comparison import Comparison
from paceline.analysis.split import WARM_UP_STEPS
from paceline.analysis.timing import profiled_steps, windows_of
from paceline.records.experiment import Contender
from paceline.records.reader import RunRecord
from paceline.records.timeline import NO_PEER, Kind, Purpose, Timeline
from paceline.report.columns import Unit, unit_for
from paceline.report.drawing import Json, Panel, axis, base_layout, heading, numbered, plain, short_names, side_note
from paceline.report.palette import OPERATIONS, PHASES
from paceline.report.words import seconds, size

MOST_RANKS = 8
MOST_BARS = 4500
"""In all steps on all ranks; where there are more, those that are nearest to each other are drawn as one."""
FINEST, COARSEST = 1 / 1600, 1 / 50
"""The share of a step that can be told apart, at best and at worst."""

MEDIAN, SLOWEST = "median step", "slowest step"
UNITS = ((1.0, "s"), (1e-3, "ms"))
WORDS = {"s": "seconds", "ms": "milliseconds"}

ROW_HEIGHT, GAP_HEIGHT, TOP, BOTTOM = 46, 34, 30, 46
"""Of a rank, with both of its lines; between two contenders."""
SMALL_ROW_HEIGHT = 28
"""Where all contenders are drawn at once."""
LEFT, NARROW_LEFT = 74, 62
COMPUTE_PLACE, WIRE_PLACE = -0.21, 0.21
THICKNESS = 0.38
"""Of a line; a rank has a height of 1."""


class Bar(NamedTuple):
    """Something that lasted, on one line of one rank."""

    what: str
    """The title of a phase or of an operation."""
    purpose: str
    """What an operation carries."""
    place: float
    """How far down; ranks are 1 apart."""
    thickness: float
    start_s: float
    end_s: float
    bytes: int = 0
    peer: str = ""
    several: int = 1
    """How many stand behind it."""


@dataclass(frozen=True)
class Scene:
    """One step of one contender."""

    contender: Contender
    which: str
    """Why this one is shown."""
    step: int
    length_s: float
    """From its start on the first rank until it has ended on the last."""
    longest_s: float
    """On the rank that took longest."""
    ranks: list[int]
    bars: list[Bar]


def timeline(comparison: Comparison) -> Json | None:
    """The figure, a view of all contenders and two of each; None where no timelines were kept."""
    scenes = [scene for row in comparison.rows for scene in scenes_of(comparison, row.contender)]
    if not scenes:
        return None
    scenes = [_thinned(scene, MOST_BARS // len(scenes)) for scene in scenes]
    unit = unit_for([scene.length_s for scene in scenes], UNITS)
    names = short_names([contender.name for contender in comparison.pool.contenders], 22)
    medians = [number for number, scene in enumerate(scenes) if scene.which == MEDIAN]
    chosen = [*([medians] if len(medians) > 1 else []), *[[number] for number in range(len(scenes))]]
    views = [_view([scenes[number] for number in numbers], numbers, names, unit) for numbers in chosen]
    return {
        "title": "Typical steps, rank by rank",
        "sets": [list(_traces(scene, unit)) for scene in scenes],
        "data": [],
        "views": views,
        "layout": base_layout(0, left=LEFT, right=8, top=TOP, bottom=BOTTOM) | {"barmode": "overlay"},
        "keys": _keys(scenes),
        "zoom": True,
    }


def scenes_of(comparison: Comparison, contender: Contender) -> list[Scene]:
    """The median step of the first repeat and the slowest one, warm-up apart."""
    runs = comparison.pool.runs_of(contender.name)
    run = next((runs[repeat] for repeat in sorted(runs) if runs[repeat].timelines), None)
    if run is None:
        return []
    ranks = _shown_ranks(sorted(run.timelines))
    chosen = _typical_steps([run.timelines[rank] for rank in ranks], profiled_steps(windows_of(run)))
    done = {rank: {one.step: one for one in step_activities(run.timelines[rank], chosen)} for rank in ranks}
    return [
        _scene(contender, which, run, [done[rank][step] for rank in ranks], ranks) for step, which in chosen.items()
    ]


def _typical_steps(timelines: Sequence[Timeline], without: Collection[int]) -> dict[int, str]:
    """The steps to show, with what they are, of those that all ranks have; `without` those that a profiler slowed."""
    lengths: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        for row in timeline.steps:
            lengths[int(row["step"])].append(float(row["end_s"] - row["start_s"]))
    longest = {step: max(own) for step, own in lengths.items() if len(own) == len(timelines)}
    known = [step for step in longest if step >= WARM_UP_STEPS and step not in without]
    counted = {step: longest[step] for step in known} or longest
    if not counted:
        return {}
    median = statistics.median_low(counted.values())
    typical = min(step for step in counted if counted[step] == median)
    slowest = max(counted, key=lambda step: counted[step])
    return {typical: MEDIAN} if slowest == typical else {typical: MEDIAN, slowest: SLOWEST}


def _shown_ranks(ranks: Sequence[int]) -> list[int]:
    """Of many ranks, some from the first to the last."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    return [ranks[round(n * (len(ranks) - 1) / (MOST_RANKS - 1))] for n in range(MOST_RANKS)]


def _scene(
    contender: Contender, which: str, run: RunRecord, steps: Sequence[StepActivity], ranks: Sequence[int]
) -> Scene:
    """Times from the start of the step on the first rank; ranks that exchange nothing drift, so each has its own."""
    first_s = min(step.start_s for step in steps)
    together = run.topology.get("exchanges", True)
    origins = [first_s if together else step.start_s for step in steps]
    length_s = max(step.end_s - origin_s for step, origin_s in zip(steps, origins, strict=True))
    bars: list[Bar] = []
    for row, (step, origin_s) in enumerate(zip(steps, origins, strict=True)):
        bars += [*_computed(row, step, origin_s), *_wired(row, step, origin_s)]
    longest_s = max(step.end_s - step.start_s for step in steps)
    return Scene(contender, which, steps[0].step, length_s, longest_s, list(ranks), bars)


def _computed(row: int, step: StepActivity, origin_s: float) -> Iterator[Bar]:
    for what, start_s, end_s in step.activities:
        yield Bar(what, "", row + COMPUTE_PLACE, THICKNESS, start_s - origin_s, end_s - origin_s)


def _wired(row: int, step: StepActivity, origin_s: float) -> Iterator[Bar]:
    """Operations that overlap share the height of the line."""
    lanes = _lanes(step.operations)
    count = max(lanes, default=0) + 1
    thickness = THICKNESS / count
    for operation, lane in zip(step.operations, lanes, strict=True):
        kind, peer = Kind(int(operation["kind"])), int(operation["peer"])
        role = {Kind.SEND: "to rank", Kind.RECV: "from rank"}.get(kind, "root: rank")
        yield Bar(
            what=kind.title,
            purpose=Purpose(int(operation["purpose"])).title,
            place=row + WIRE_PLACE + (lane - (count - 1) / 2) * thickness,
            thickness=thickness,
            start_s=float(operation["start_s"]) - origin_s,
            end_s=float(operation["end_s"]) - origin_s,
            bytes=int(operation["bytes"]),
            peer="" if peer == NO_PEER else f"{role} {peer}",
        )


def _lanes(operations: Iterable[Any]) -> list[int]:
    """For each operation, in the order of their start, the first lane that is free by then."""
    free_from_s: list[float] = []
    found = []
    for operation in operations:
        lane = next((n for n, free_s in enumerate(free_from_s) if free_s <= operation["start_s"]), len(free_from_s))
        free_from_s[lane:] = [float(operation["end_s"]), *free_from_s[lane + 1 :]]
        found.append(lane)
    return found


def _thinned(scene: Scene, most: int) -> Scene:
    """The same with no more bars than that, if merging those that can hardly be told apart gets there."""
    bars, finest = scene.bars, FINEST
    while len(bars) > most and finest < COARSEST:
        bars = list(_merged(scene.bars, finest * scene.length_s))
        finest *= 1.5
    return replace(scene, bars=bars)


def _merged(bars: Sequence[Bar], finest_s: float) -> Iterator[Bar]:
    """Bars of one kind on one line that lie closer than can be told apart, as one."""
    lines: dict[tuple[Any, ...], list[Bar]] = defaultdict(list)
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        line = lines[bar.what, bar.purpose, bar.place]
        last = line[-1] if line else None
        if last is None or bar.start_s - last.end_s > finest_s or bar.end_s - last.start_s > 8 * finest_s:
            line.append(bar)
            continue
        peer = last.peer if last.peer == bar.peer else ""
        end_s, count = max(last.end_s, bar.end_s), last.several + bar.several
        line[-1] = last._replace(end_s=end_s, bytes=last.bytes + bar.bytes, peer=peer, several=count)
    for line in lines.values():
        yield from line


def _traces(scene: Scene, unit: Unit) -> Iterator[Json]:
    """A trace per kind of bar."""
    kinds: dict[tuple[str, str], list[Bar]] = defaultdict(list)
    for bar in scene.bars:
        kinds[bar.what, bar.purpose].append(bar)
    for (what, purpose), bars in kinds.items():
        named = f"{what} of {purpose}" if purpose else WAITING_WORDS if what == WAITING else what
        trace = {
            "type": "bar",
            "orientation": "h",
            "base": [_in(unit, bar.start_s) for bar in bars],
            "x": [_in(unit, bar.end_s - bar.start_s) for bar in bars],
            "y": [round(bar.place, 3) for bar in bars],
            "width": _alike([round(bar.thickness, 3) for bar in bars]),
            "marker": _look(what),
            "meta": plain(named),
            "customdata": [_about(bar, scene.ranks) for bar in bars],
            "hovertemplate": "%{customdata[0]}: %{meta}%{customdata[1]}<br>%{customdata[2]}, from %{base:.2f} "
            f"{unit.name} on<extra></extra>",
        }
        yield trace


WAITING_WORDS = "waiting for the wire"


def _look(what: str) -> Json:
    """Waiting is not filled, since nothing is done in it."""
    colour = (PHASES | OPERATIONS)[what]
    if what != WAITING:
        return {"color": colour, "line": {"width": 0}}
    pattern = {"shape": "/", "fgcolor": colour, "bgcolor": f"{colour}1f", "size": 5, "solidity": 0.25}
    return {"color": f"{colour}1f", "line": {"width": 0}, "pattern": pattern}


def _about(bar: Bar, ranks: Sequence[int]) -> list[str]:
    """What is said of a bar beside its kind: whose it is, how much it carries and to whom, how long it took."""
    carried = [f"{bar.several} ×"] if bar.several > 1 else []
    carried += [size(bar.bytes)] if bar.purpose else []
    carried += [bar.peer] if bar.peer else []
    words = "".join(f", {part}" for part in carried)
    return [f"rank {ranks[round(bar.place)]}", words, seconds(bar.end_s - bar.start_s)]


def _in(unit: Unit, value_s: float) -> float:
    """To a microsecond, or to what a figure of several seconds can show."""
    return round(value_s / unit.scale, 3 if unit.scale < 1 else 5)


def _alike(values: list[float]) -> float | list[float]:
    return values[0] if len(set(values)) == 1 else values


def _keys(scenes: Sequence[Scene]) -> list[Json]:
    """What the colours mean, of those that occur; two kinds that share a colour share a line."""
    seen = {bar.what for scene in scenes for bar in scene.bars}
    found: dict[str, Json] = {}
    for what in (*ACTIVITIES, *[kind.title for kind in Kind if kind.is_operation]):
        if what not in seen:
            continue
        colour = (PHASES | OPERATIONS)[what]
        key = f"{colour}{what == WAITING}"
        label = f"{found[key]['label']} / {what}" if key in found else what
        found[key] = {"label": label, "colour": colour, "hollow": what == WAITING}
    return list(found.values())


def _view(shown: Sequence[Scene], numbers: Sequence[int], names: dict[str, str], unit: Unit) -> Json:
    """Scenes below each other, on one scale."""
    alone = len(shown) == 1
    group, label = (names[shown[0].contender.name], shown[0].which) if alone else ("All", "median steps")
    return {
        "group": group,
        "label": label,
        "sets": [[number, numbered("y", place)] for place, number in enumerate(numbers)],
        "layout": _layout(shown, names, ROW_HEIGHT if alone else SMALL_ROW_HEIGHT, unit),
    }


def _layout(scenes: Sequence[Scene], names: dict[str, str], row_height: int, unit: Unit) -> Json:
    heights = [row_height * len(scene.ranks) for scene in scenes]
    inside = sum(heights) + GAP_HEIGHT * (len(scenes) - 1)
    # One process may take much longer than those that share the work: then it is cut, so that they can be seen.
    sharing = [scene.length_s for scene in scenes if scene.contender.role != "baseline"]
    longest_s = max(sharing or [scene.length_s for scene in scenes])
    layout: Json = {"height": inside + TOP + BOTTOM, "annotations": []}
    layout["xaxis"] = axis(
        f"{WORDS[unit.name]} since the step began", range=[0, _in(unit, 1.01 * longest_s)], fixedrange=False, nticks=10
    )
    layout["xaxis"]["anchor"] = numbered("y", len(scenes) - 1)
    top = inside
    for place, (scene, height) in enumerate(zip(scenes, heights, strict=True)):
        panel = Panel((0, 1), ((top - height) / inside, top / inside))
        top -= height + GAP_HEIGHT
        layout[numbered("yaxis", place)] = _rank_axis(scene, panel)
        layout["annotations"] += [
            heading(plain(names[scene.contender.name]), panel, raised=4),
            side_note(f"step {scene.step}, {seconds(scene.longest_s)}", panel, raised=4),
        ]
    return layout


def _rank_axis(scene: Scene, panel: Panel) -> Json:
    count = len(scene.ranks)
    return axis(
        domain=panel.y,
        anchor="x",
        range=[count - 0.5, -0.5],
        showgrid=False,
        tickvals=[row + place for row in range(count) for place in (COMPUTE_PLACE, WIRE_PLACE)],
        ticktext=[text for rank in scene.ranks for text in (f"rank {rank} ", "wire ")],
        tickfont={"size": 10.5, "color": "@muted"},
    )
