"""A fit as lmfit's ``Parameters``, for notebooks that already speak lmfit."""

import lmfit
import numpy as np

from fitting.laws import law_named
from fitting.values import Fit


def lmfit_parameters(fit: Fit) -> lmfit.Parameters:
    """The fit's parameters with their bounds; ``print(lmfit.fit_report(lmfit_parameters(fit)))`` shows them.

    ``stderr`` and ``correl`` come from the bootstrap draws, since lmfit's own are wrong under a robust loss. Both are
    None for parameters without an interval.
    """
    law = law_named(fit.law)
    known = [k for k, interval in enumerate(fit.intervals) if interval is not None]
    spread = fit.draws.std(axis=0, ddof=1) if known else np.zeros(law.n_parameters)
    view = lmfit.Parameters()
    for name, value, low, high in zip(law.parameter_names, fit.parameters, law.lower, law.upper, strict=True):
        view.add(name, value=value, min=low, max=high)
    if len(known) < 2:
        return view
    correlations = np.atleast_2d(np.corrcoef(fit.draws[:, known], rowvar=False))
    for row, k in zip(correlations, known, strict=True):
        parameter = view[law.parameter_names[k]]
        parameter.stderr = float(spread[k])
        others = zip(known, row, strict=True)
        parameter.correl = {law.parameter_names[other]: float(value) for other, value in others if other != k}
    return view
