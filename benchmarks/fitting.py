"""How much CPU the joint fit takes beside lmfit from 27 sensible starts, on the synthetic paper grid.

``python -m benchmarks.fitting [--json]`` prints and writes nothing. Machines are shared, so the two are timed in turns
and compared by CPU time and its ratio, never by wall time.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

import lmfit
import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from fitting.engine import huber
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT
from fitting.observations import Columns, Observations, observations_from_table
from fitting.predict import log_longppl
from fitting.values import FloatArray

TABLE = Path(__file__).parents[1] / "tests" / "data" / "synthetic_paper_grid.csv"
COLUMNS = ("loss", "loss_clustered", "loss_outliers")
HUBER_DELTA = 0.05
DRAWS = 200
_SENSIBLE = (0.1, 0.3, 0.6)
_T = TypeVar("_T")
_UNITS = np.array([1e8, 1e9, 1e9])


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """CPU seconds of each way to fit one column, and how far our objective lies above lmfit's (relative)."""

    column: str
    fit_cpu_s: float
    fit_with_draws_cpu_s: float
    lmfit_cpu_s: float
    ratio: float
    objective: float
    lmfit_objective: float
    excess: float


def lmfit_objective(observations: Observations) -> float:
    """The best summed Huber loss of lmfit's ``least_squares`` over 27 starts.

    Each start has exponents from {.1, .3, .6} and gives each term a third of the mean loss.
    """
    sizes = observations.sizes / _UNITS
    y = observations.log_longppl

    def residuals(parameters: lmfit.Parameters) -> FloatArray:
        return log_longppl(list(parameters.valuesdict().values()), *sizes.T) - y

    best = np.inf
    for exponents in product(_SENSIBLE, repeat=3):
        start = lmfit.Parameters()
        scale = np.exp(np.log(sizes).mean(axis=0) * exponents)
        values = [value for pair in zip(y.mean() / 3 * scale, exponents, strict=True) for value in pair]
        for name, value, low, high in zip(
            LONG_CONTEXT.parameter_names, [*values, 0.0], LONG_CONTEXT.lower, LONG_CONTEXT.upper, strict=True
        ):
            start.add(name, value=value, min=low, max=high)
        end = lmfit.minimize(residuals, start, method="least_squares", loss="huber", f_scale=HUBER_DELTA)
        best = min(best, float(huber(residuals(end.params), HUBER_DELTA).sum()))
    return best


def compare(column: str, repeats: int = 2) -> Comparison:
    """Time the fits of one column in turns; the fastest of each counts."""
    table = pd.read_csv(TABLE)
    columns = Columns(n_params="N", short_tokens="Ds", long_tokens="Dl", log_longppl=column)
    observations = observations_from_table(table[table.held_out == 0], columns=columns)
    alone, with_draws, rival = np.inf, np.inf, np.inf
    for _ in range(repeats):
        seconds, ours = _cpu_seconds(lambda: fit(LONG_CONTEXT, observations, bootstrap_draws=0).objective)
        alone = min(alone, seconds)
        with_draws = min(with_draws, _cpu_seconds(lambda: fit(LONG_CONTEXT, observations, bootstrap_draws=DRAWS))[0])
        seconds, theirs = _cpu_seconds(lambda: lmfit_objective(observations))
        rival = min(rival, seconds)
    return Comparison(
        column=column,
        fit_cpu_s=alone,
        fit_with_draws_cpu_s=with_draws,
        lmfit_cpu_s=rival,
        ratio=rival / alone,
        objective=ours,
        lmfit_objective=theirs,
        excess=ours / theirs - 1,
    )


def _cpu_seconds(run: Callable[[], _T]) -> tuple[float, _T]:
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def main() -> None:
    """Print the comparison as a table, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    comparisons = [compare(column) for column in COLUMNS]
    if as_json:
        versions = {"python": platform.python_version(), "numpy": np.__version__, "lmfit": lmfit.__version__}
        print(json.dumps({"versions": versions, "comparisons": [asdict(row) for row in comparisons]}, indent=2))
        return
    shown = Table("CPU seconds", "fit", f"+ {DRAWS} refits", "lmfit, 27 starts", "lmfit / fit", "excess")
    for row in comparisons:
        shown.add_row(
            row.column,
            f"{row.fit_cpu_s:.3f}",
            f"{row.fit_with_draws_cpu_s:.2f}",
            f"{row.lmfit_cpu_s:.2f}",
            f"{row.ratio:.0f}",
            f"{row.excess:+.1e}",
        )
    Console().print(shown)


if __name__ == "__main__":
    main()
