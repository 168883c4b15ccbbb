"""All parsers of outside input, by name."""

from __future__ import annotations

from fuzzing import checkpoints, configs, data_files, records, specs

PARSERS = {
    parser.name: parser for module in (specs, configs, records, checkpoints, data_files) for parser in module.PARSERS
}
SOAK_EXAMPLES = 1_000_000
"""Examples of `make soak` over all parsers."""


def soak_examples(name: str) -> int:
    """Return the examples of one parser in `make soak`, at least its share."""
    return -(-SOAK_EXAMPLES * PARSERS[name].weight // sum(parser.weight for parser in PARSERS.values()))
