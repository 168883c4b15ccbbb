"""Parsers of TOML files: settings of commands, and recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fuzzing.mutations import change_bytes
from fuzzing.parser import Parser, Prepared
from paceline.config import BatchConfig, CompareConfig, LaunchConfig, RunConfig, ScaleConfig
from paceline.config.fields import from_mapping, read_toml
from paceline.config.recipe import Recipe, read_recipe

KINDS = (CompareConfig, ScaleConfig, BatchConfig, RunConfig, LaunchConfig)
SETTINGS = (
    b'workload = "cnn"\nranks = 2\nbatch = 64 # global\nlr = 0.1\nvary = ["lr=0.1,0.2", "batch=32"]\n',
    b'strategies = "ddp,ring"\nsizes = [32, 64]\nproof = false\ntimeout = 1e2\nslow-rank = """1:3"""\n',
    b"repeats = 0x3\nseed = 1_000\nclip_norm = +0.5\nevents = true\nemulate = '2@1gbit'\nnode_rank=0\n",
)
RECIPES = (
    b'optimizer = "adamw"\nlr = 3e-4\nschedule = "cosine"\nwarmup_epochs = 1.5\n',
    b'optimizer = "sgd"\nnesterov = true\nmomentum = 0.9\nscale_lr = "sqrt"\ncutout = 8\n',
)


def _prepare(name: str, seeds: tuple[bytes, ...], read: Callable[[Path], object]) -> Callable[[Path], Prepared]:
    def prepare(folder: Path) -> Prepared:
        file = folder / name

        def parse(content: bytes) -> None:
            file.write_bytes(content)
            read(file)

        return Prepared(seeds, parse)

    return prepare


def _read_settings(file: Path) -> None:
    settings = read_toml(file, *KINDS)
    for kind in (CompareConfig, BatchConfig, RunConfig):
        from_mapping(kind, settings)


def _read_recipe(file: Path) -> None:
    read_recipe(str(file), Recipe())


PARSERS = (
    Parser("TOML settings", _prepare("settings.toml", SETTINGS, _read_settings), change_bytes, weight=50),
    Parser("TOML recipe", _prepare("recipe.toml", RECIPES, _read_recipe), change_bytes, "recipe.toml", weight=50),
)
