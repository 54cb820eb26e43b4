"""Student's t distribution, for confidence intervals over seeds."""

from __future__ import annotations

_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL_95 = 1.959964


def student_95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t: the half-width of a 95 % interval in standard errors.

    Args:
        freedom: Degrees of freedom, at least 1: the number of values minus one.
    """
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    # The expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5), which is exact to five digits from 31 on.
    z = _NORMAL_95
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))
