"""The remaining time of an experiment, on a simulated clock: the range covers the truth and narrows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from paceline.analysis.remaining_time import Part, RemainingTime, TimeEstimator

LAUNCH, EXAMINATION = Part("launch", "1x2"), Part("examination")
NAMES = ("single", "ddp", "allreduce")


@dataclass
class Simulation:
    """Comparison on a simulated clock, which takes `factor` times as long as guessed."""

    seed: int = 0
    factor: float = 1.0
    noise: float = 0.1
    slowdown: float = 1.0
    guessed: bool = True
    repeats: int = 3
    most_repeats: int = 6
    done_repeats: int = 3
    """Repeats after which the comparison ends."""
    now_s: float = 1000.0
    seen: list[tuple[float, RemainingTime | None]] = field(default_factory=list)
    """Time and estimate after each event."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        guesses = {LAUNCH: 4.0, EXAMINATION: 8.0}
        guesses |= {Part("proof", name): 1.0 for name in NAMES}
        guesses |= {Part("run", name): 2.0 + 4 * number for number, name in enumerate(NAMES)}
        self.guesses = guesses
        slowdowns = dict.fromkeys(guesses, self.slowdown)
        self.estimator = TimeEstimator(guesses if self.guessed else None, slowdowns, clock=lambda: self.now_s)

    def launch(self, stage: str, parts: list[Part]) -> None:
        boundaries: list[float | None] = []
        with self.estimator.launched(stage, LAUNCH, parts, lambda: boundaries):
            self.wait(0.9 * self.guesses[LAUNCH])
            boundaries.append(self.now_s)
            for part in parts:
                self.wait(self.guesses[part])
                boundaries.append(self.now_s)
            self.wait(0.1 * self.guesses[LAUNCH])

    def wait(self, seconds: float) -> None:
        """Let time pass, with a look at the estimate in the middle of it."""
        for _ in range(2):
            self.now_s += seconds / 2 * self.factor * (1 + self.random.uniform(-self.noise, self.noise))
            self.look()

    def look(self) -> None:
        self.seen.append((self.now_s, self.estimator.remaining()))

    def run(self) -> Simulation:
        expect, runs = self.estimator.expect, [Part("run", name) for name in NAMES]
        proofs = [Part("proof", name) for name in NAMES]
        expect("doctor", [LAUNCH, EXAMINATION])
        expect("proof", [LAUNCH, *proofs])
        expect("later", [LAUNCH, *runs], self.repeats, self.most_repeats)
        self.look()
        self.launch("doctor", [EXAMINATION])
        self.launch("proof", proofs)
        for repeat in range(1, self.done_repeats + 1):
            expect("repeat", [LAUNCH, *runs])
            expect("later", [LAUNCH, *runs], max(0, self.repeats - repeat), self.most_repeats - repeat)
            self.launch("repeat", runs)
        expect("later", [])
        self.look()
        return self

    @property
    def judged(self) -> Iterator[tuple[float, RemainingTime]]:
        """True remaining time and estimate at each look that had one."""
        return ((self.now_s - at, found) for at, found in self.seen if found is not None)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("factor", "slowdown"),
    [(1.0, 1.0), (0.6, 1.0), (1.7, 1.0), (1.2, 4.0), (4.0, 4.0), (6.0, 4.0), (8.0, 10.0), (10.0, 10.0)],
)
def test_the_range_covers_the_true_time(seed: int, factor: float, slowdown: float) -> None:
    for done in (3, 6):
        simulation = Simulation(seed, factor, slowdown=slowdown, done_repeats=done).run()
        judged = list(simulation.judged)
        assert len(judged) == len(simulation.seen)
        for true_s, found in judged:
            assert found.low_s <= true_s + 1e-9
            assert true_s <= (found.high_s if done == 3 else found.most_s) + 1e-9, (true_s, found)


def test_the_range_narrows() -> None:
    simulation = Simulation(factor=1.5, slowdown=2.0).run()
    before, repeat = 1 + 2 * 3 + 2 * 5, 2 * 5
    after = [simulation.seen[before + number * repeat][1] for number in range(3)]
    first = simulation.seen[0][1]
    known = [found for found in (first, *after) if found is not None]
    assert len(known) == 4, "before anything, after the proof, after one repeat, after two"
    widths, ratios = ([found.high_s - found.low_s for found in known], [found.high_s / found.low_s for found in known])
    assert widths == sorted(widths, reverse=True)
    assert ratios[0] < 5, "errors of different kinds do not all have the same sign"
    assert ratios[2] < 4.5
    assert ratios[3] < 2.5
    assert simulation.seen[-1][1] == RemainingTime(0, 0, 0)


def test_load_widens_the_first_range_by_no_more_than_the_root_of_the_slowdown() -> None:
    quiet, busy = (Simulation(slowdown=slowdown).run().seen[0][1] for slowdown in (1.0, 4.0))
    assert quiet is not None
    assert busy is not None
    assert busy.high_s / busy.low_s < 2 * quiet.high_s / quiet.low_s
    assert busy.low_s > quiet.low_s


def test_a_slow_part_lengthens_only_itself() -> None:
    quick, slow = Part("run", "ddp"), Part("run", "single")
    estimator = TimeEstimator({quick: 10.0, slow: 10.0}, {slow: 25.0})
    ranges = []
    for part in (quick, slow):
        estimator.expect("later", [part])
        ranges.append(estimator.remaining())
    alone, beside = ranges
    assert alone is not None
    assert beside is not None
    assert alone.high_s < 20
    assert beside.low_s > 10
    assert beside.high_s > 250


def test_without_guesses_the_range_begins_after_the_first_run() -> None:
    simulation = Simulation(guessed=False, noise=0.0).run()
    unknown = [found is None for _, found in simulation.seen]
    first = unknown.index(False)
    assert all(unknown[:first])
    assert not any(unknown[first:])
    # The look before, the doctor, the proof, then the launch and the first run of the first repeat.
    assert first == 1 + 2 * 3 + 2 * 5 + 2 * 2
    for true_s, found in simulation.judged:
        assert found.low_s <= true_s + 1e-9
        assert true_s <= found.high_s + 1e-9


def test_a_part_that_takes_longer_than_expected_is_not_about_to_end() -> None:
    now_s = 0.0
    estimator = TimeEstimator({LAUNCH: 4.0, EXAMINATION: 8.0}, clock=lambda: now_s)
    estimator.expect("doctor", [LAUNCH, EXAMINATION])
    with estimator.launched("doctor", LAUNCH, [EXAMINATION], lambda: [4.0]):
        now_s = 104.0
        left = estimator.remaining()
    assert left is not None
    assert left.low_s == 0
    assert left.high_s >= 50


def test_a_candidate_that_failed_is_not_expected_again() -> None:
    run, other = Part("run", "ddp"), Part("run", "tree")
    estimator = TimeEstimator({run: 10.0, other: 10.0})
    estimator.expect("later", [run, other], 2, 4)
    before = estimator.remaining()
    estimator.leave_out("tree")
    after = estimator.remaining()
    assert before is not None
    assert after is not None
    assert (after.low_s, after.most_s) == (before.low_s / 2, before.most_s / 2)


def test_measurements_replace_guesses_and_scale_those_of_the_same_kind() -> None:
    run, other = Part("run", "ddp"), Part("run", "tree")
    estimator = TimeEstimator({run: 10.0, other: 20.0})
    estimator.expect("later", [run])
    for _ in range(50):
        estimator.measure(run, 30.0)
    own = estimator.remaining()
    assert own == RemainingTime(pytest.approx(30 / 1.1), pytest.approx(33), pytest.approx(33))
    estimator.expect("later", [other])
    scaled = estimator.remaining()
    assert scaled is not None
    assert scaled.low_s < 60 < scaled.high_s
