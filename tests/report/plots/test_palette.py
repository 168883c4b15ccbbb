"""Colours: those of strategies follow the registry, whatever is added to it."""

from __future__ import annotations

from dataclasses import replace

from contrast import contrast
from paceline.records.experiment.design import Candidate
from paceline.report.plots.palette import NEUTRALS, colours, colours_of_strategies
from paceline.strategies.registry import ENTRIES


def test_every_strategy_has_its_own_visible_colour() -> None:
    given = colours_of_strategies(ENTRIES.values())
    assert given.keys() == ENTRIES.keys()
    assert len(set(given.values())) == len(ENTRIES)
    assert all(contrast(colour, ground) >= 3 for colour in given.values() for ground in ("#ffffff", "#16181c"))
    assert [name for name in given if given[name] in NEUTRALS] == ["single", "none"]


def test_strategies_keep_their_colours_when_others_are_added() -> None:
    more = [*ENTRIES.values(), *[replace(ENTRIES["ring"], name=f"new {number}") for number in range(20)]]
    given = colours_of_strategies(more)
    assert given.items() >= colours_of_strategies(ENTRIES.values()).items()
    assert len(set(given.values())) == len(more)
    assert all(contrast(colour, ground) >= 3 for colour in given.values() for ground in ("#ffffff", "#16181c"))
    known = {"ddp": "#0072b2", "allreduce": "#d55e00", "gather_scatter": "#009a70", "parameter_server": "#0c97a3"}
    assert given.items() >= known.items(), "earlier reports have these"


def test_a_strategy_has_the_same_colour_on_every_page() -> None:
    alone, none = Candidate("ring", "ring"), Candidate("none", "none", role="bound")
    own = Candidate("mine", "my_module:Mine")
    assert (
        colours([alone])["ring"]
        == colours([own, none, alone])["ring"]
        == colours_of_strategies([*ENTRIES.values()])["ring"]
    )
    assert colours([own, none, alone])["none"] in NEUTRALS
