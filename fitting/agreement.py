"""How well two protocols agree on the same cells."""

import numpy as np
from numpy.typing import ArrayLike

from fitting.errors import InvalidObservationsError


def concordance(x: ArrayLike, y: ArrayLike) -> float:
    """Lin's concordance correlation coefficient, 2 s_xy / (s_x^2 + s_y^2 + (mean x - mean y)^2), all over n.

    One for equal values, lower for every shift, stretch or scatter (Lin 1989, Biometrics 45).

    Raises:
        InvalidObservationsError: the two differ in length, have fewer than two values or one that is not finite, or
            neither varies.
    """
    one, other = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if one.shape != other.shape or one.ndim != 1 or len(one) < 2:
        raise InvalidObservationsError(f"agreement needs two lists of one length, have {one.shape} and {other.shape}")
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise InvalidObservationsError("agreement needs finite values")
    shared = float(((one - one.mean()) * (other - other.mean())).mean())
    spread = float(one.var() + other.var() + (one.mean() - other.mean()) ** 2)
    if spread == 0:
        raise InvalidObservationsError("agreement is not defined where no value differs")
    return 2 * shared / spread
