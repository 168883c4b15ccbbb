"""Damaged input of every kind is parsed or refused with a clear error: no other exception, no hang, no memory blow-up.

`make test` has hypothesis choose some hundred inputs per parser, the same ones each time. `make soak` takes a million
from seeded generators. A failure names the number of the example; `damaged(name, number)` in a shell makes it again.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzzing.all_parsers import PARSERS, SOAK_EXAMPLES, soak_examples
from fuzzing.parser import MOST_BYTES, Parser, Prepared, check_example, check_seeds, peak_bytes

pytestmark = pytest.mark.takes(20)

EXAMPLES = 100
"""Examples of each parser in `make test`; a tenth of that for slow ones."""


@pytest.fixture(params=PARSERS.values(), ids=PARSERS.keys())
def parser(request: pytest.FixtureRequest) -> Parser:
    """One of the parsers."""
    chosen: Parser = request.param
    return chosen


@pytest.fixture
def prepared(parser: Parser, tmp_path: Path) -> Prepared:
    """The parser with its valid inputs, which it accepts."""
    ready = parser.prepare(tmp_path)
    check_seeds(ready)
    return ready


def test_damaged_input_is_parsed_or_refused(parser: Parser, prepared: Prepared) -> None:
    examples = EXAMPLES // 10 if parser.slow else EXAMPLES

    @settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(random=st.randoms(use_true_random=False))
    def check(random: Random) -> None:
        check_example(parser, prepared, random)

    check()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_damaged_inputs(parser: Parser, prepared: Prepared) -> None:
    before = peak_bytes()
    refused = 0
    for number in range(examples := soak_examples(parser.name)):
        try:
            refused += check_example(parser, prepared, Random(number))
        except BaseException as error:
            error.add_note(f"example {number} of {parser.name!r}: {shortened(damaged(parser, prepared, number))}")
            raise
    used = peak_bytes() - before
    print(f"{parser.name}: {examples} examples, {refused} refused, {used >> 20} MiB more memory")
    assert used < MOST_BYTES, "the parser used memory without a bound"
    assert refused < examples, "nothing was accepted"


def test_the_soak_has_a_million_examples() -> None:
    assert SOAK_EXAMPLES <= sum(map(soak_examples, PARSERS)) < SOAK_EXAMPLES + len(PARSERS)


def damaged(parser: Parser, prepared: Prepared, number: int) -> Any:
    """Return the input of one example of `make soak`."""
    random = Random(number)
    return parser.change(random.choice(prepared.seeds), prepared.seeds, random)


def shortened(value: Any) -> str:
    """Return the beginning of an input."""
    return repr(value)[:2_000]
