"""A fit as lmfit's ``Parameters``, for notebooks that already speak lmfit."""

import lmfit
import numpy as np

from fitting.compare import bic
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


def lmfit_report(fit: Fit) -> str:
    """The fit as lmfit reports a model's: statistics, then parameters with spreads and correlations of the draws."""
    law = law_named(fit.law)
    n, size = fit.n_observations, law.n_parameters
    statistics = {
        "# fitting method": "varpro, newton",
        "# data points": n,
        "# variables": size,
        "objective": f"{fit.objective:.8g} ({fit.loss.value})",
        "gradient": f"{fit.gradient_norm:.1e}",
        "bayesian info crit": f"{bic(fit.objective, n, size):.6g}" if fit.objective > 0 else "-inf",
        "R-squared": "-" if fit.r2 is None else f"{fit.r2:.8f}",
    }
    lines = [f"    {name:<18} = {value}" for name, value in statistics.items()]
    head = ["[[Model]]", f"    {law.formula}", "[[Fit Statistics]]", *lines]
    return "\n".join([*head, lmfit.fit_report(lmfit_parameters(fit))])
