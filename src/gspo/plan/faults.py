"""Failures and checkpoints in closed form: how often to save, and what share of the time is left for work."""

from __future__ import annotations

import math


def young_interval(save_s: float, mtbf_s: float) -> float:
    """√(2δM): the first-order best time between checkpoints (Young, CACM 17(9), 1974)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """The higher-order best time of work between checkpoints (Daly, FGCS 22(3), 2006, eq. 37)."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = save_s / (2 * mtbf_s)
    return young_interval(save_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def useful_share(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time that is work kept: Daly's expected run time for exponential failures, inverted.

    An interval of work τ and its save δ takes M e^{R/M} (e^{(τ+δ)/M} − 1) seconds on average.
    """
    if math.isinf(mtbf_s):
        return interval_s / (interval_s + save_s)
    exponent = (interval_s + save_s) / mtbf_s
    if exponent > 500:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))
