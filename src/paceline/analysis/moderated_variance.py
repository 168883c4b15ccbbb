"""Variance between repeats, moderated by what else an experiment knows about its noise.

Three repeats have two degrees of freedom, for which Student's t is 4.3: the interval is wide, and it depends mostly on
how close the three values are by chance. The same experiment has two more sources on the size of the noise:

- **Other candidates.** Every repeat measures all candidates. The variance over repeats of the difference of two of
  them shows the noise that is left when the effect of a repeat, which all candidates share, is removed. Only candidates
  other than the two compared count, so that a disturbance of one of the two counts once.
- **Windows.** The times of the windows of a run give the variance of its median. Windows do not show effects that a
  whole run has in common, so their variance is inflated, has a small weight, and is the least that the noise can be.

Both make a prior for the variance s² of the repeats: a variance s₀² with d₀ degrees of freedom. The moderated variance
is (d₀·s₀² + d·s²) ÷ (d₀ + d), with d₀ + d degrees of freedom for Student's t (Smyth 2004, "Linear models and empirical
Bayes methods for assessing differential expression", the method of limma). No prior can make the interval narrower for
every size of the noise without losing coverage, so d₀ is reduced where s² and s₀² contradict each other, as for
hypervariable genes in Phipson et al. 2016, "Robust hyperparameter estimation protects against hypervariable genes". A
burst of load in one repeat makes s² large: then the interval is that of Student's t.

`tests/analysis/test_costs.py` measures how often the interval covers the true value, and its width. In real runs that
were not used to choose its constants (60 comparisons of four equal candidates, `cnn` on 2 ranks, 3 repeats, each on two
cores of its own) 352 of 360 intervals contained a ratio of 1, and their mean width was 0.82 of that of Student's t.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

WINDOW_INFLATION = 4.0
"""Variance between repeats ÷ the variance of the mean of windows, before it is measured. In 30 A/A comparisons on a
busy machine it was 1.2–17, the median 4: the result of a run is a median, whose variance is 1.6 times that of a mean,
and windows of a run have more in common than batches remove."""
WINDOW_FREEDOM = 0.3
"""Degrees of freedom of the inflated variance of windows: few, since the inflation differs between machines."""
MAX_PRIOR_FREEDOM = 8.0
"""Degrees of freedom that a prior from any number of candidates stays below, since candidates differ in their noise."""
MAX_BATCHES = 10
"""Most batches that the windows of a run are divided into (Schmeiser 1982, "Batch size effects in the analysis of
simulation output": 10 to 30). Windows that follow each other are correlated, long batches hardly are."""


class Variance(NamedTuple):
    """Variance with the degrees of freedom of its estimate."""

    value: float
    freedom: float


def window_variance(times: Sequence[float]) -> float | None:
    """Return the variance of the mean of consecutive values by the method of batch means; None for fewer than two.

    The value of a batch is its median, as that of a run.
    """
    count = min(len(times), MAX_BATCHES)
    if count < 2:
        return None
    ends = [len(times) * batch // count for batch in range(count + 1)]
    batches = [statistics.median(times[start:end]) for start, end in pairwise(ends)]
    return statistics.variance(batches) / count


def prior_of_pair(others: Sequence[Sequence[float]], windows: float | None) -> Variance | None:
    """Return the prior for the variance of the difference of two candidates over repeats; None without any source.

    `others` has the values of each other candidate in the same repeats, `windows` is the variance of the difference by
    the windows of the runs.
    """
    common = variance_of_pairs(others)
    if common is None:
        return prior_of_windows(windows)
    if windows is None:
        return Variance(common.value, _limited(common.freedom))
    freedom = common.freedom + WINDOW_FREEDOM
    value = common.freedom * max(common.value, windows) + WINDOW_FREEDOM * WINDOW_INFLATION * windows
    return Variance(value / freedom, _limited(freedom))


def variance_of_pairs(candidates: Sequence[Sequence[float]]) -> Variance | None:
    """Return the typical variance over repeats of the difference of two of these candidates; None for fewer than two.

    It is the median over all pairs, so few noisy candidates or disturbed runs do not change it, scaled by the median of
    its distribution, a chi-squared one. The degrees of freedom are those of the layout repeat × candidate.
    """
    values = np.array(candidates, dtype=np.float64)
    if len(values) < 2 or values.shape[1] < 2:
        return None
    from scipy.special import chdtri  # Imported here because scipy takes 0.2 s, and commands that fail need none of it.

    one, other = np.triu_indices(len(values), k=1)
    variances = np.sort(np.var(values[one] - values[other], axis=1, ddof=1))
    freedom = values.shape[1] - 1
    median = float(variances[(len(variances) - 1) // 2])
    return Variance(median * freedom / float(chdtri(freedom, 0.5)), freedom * (len(values) - 1))


def prior_of_windows(windows: float | None) -> Variance | None:
    """Return the prior for a variance over repeats from the variance by windows alone; None if that is unknown."""
    return None if windows is None else Variance(WINDOW_INFLATION * windows, _limited(WINDOW_FREEDOM))


def moderated(measured: Variance, prior: Variance | None) -> Variance:
    """Combine the measured variance of repeats with a prior, which counts less the more the two contradict each other.

    The prior counts in full where a third of the variances that it expects are below the measured one. From there its
    degrees of freedom fall to 0: upwards in proportion to the probability of a larger variance, since the interval
    would be too narrow, and downwards faster, so that noisy candidates do not widen the intervals of the others.
    """
    if prior is None or prior.value <= 0:
        return measured
    from scipy.special import fdtrc  # Imported here for the same reason as `chdtri`.

    above = float(fdtrc(measured.freedom, prior.freedom, measured.value / prior.value))
    weight = min(1.5 * above, (3 * (1 - above)) ** 1.5)
    freedom = weight * prior.freedom
    total = freedom + measured.freedom
    return Variance((freedom * prior.value + measured.freedom * measured.value) / total, total)


def _limited(freedom: float) -> float:
    return 1 / (1 / freedom + 1 / MAX_PRIOR_FREEDOM)
