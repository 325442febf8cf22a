"""How much CPU fits take beside lmfit and scipy, on the synthetic paper grid.

``python -m benchmarks.fitting [--json]`` prints and writes nothing. Machines are shared, so all ways are timed in turns
and compared by CPU time and its ratio, never by wall time; the fastest of each counts. A fit is the whole of it but
for intervals: the search, its certificate, what the rows determine, warnings. The others are bare minimisers from 27
starts, exponents from {.1, .3, .6} and a third of the mean loss for each term. Each turn makes ten fits, as many as
fill the time of a few of the others' starts. Ratios are those of the sums over three columns.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TypeVar

import lmfit
import numpy as np
import pandas as pd
import scipy
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from fitting import bootstrap, engine
from fitting.engine import Problem
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT
from fitting.observations import Columns, Observations, observations_from_table
from fitting.predict import log_longppl
from fitting.rows import Procedure, problem_of, rows_of
from fitting.values import FloatArray, Residual

TABLE = Path(__file__).parents[1] / "tests" / "data" / "synthetic_paper_grid.csv"
COLUMNS = ("loss", "loss_clustered", "loss_outliers")
HUBER_DELTA = 0.05
DRAWS = 1000
SCIPY_DRAWS = 40
_ROUNDS = 4
_REFIT_ROUNDS = 16
_TIMES = {"fit": 10}
_SENSIBLE = (0.1, 0.3, 0.6)
_UNITS = np.array([1e8, 1e9, 1e9])
_T = TypeVar("_T")


def observations_of(column: str) -> Observations:
    """S1-S4 of one column of the grid."""
    table = pd.read_csv(TABLE)
    columns = Columns(n_params="N", short_tokens="Ds", long_tokens="Dl", log_longppl=column)
    return observations_from_table(table[table.held_out == 0], columns=columns)


def problem_for(observations: Observations) -> Problem:
    """The seven-parameter problem of those rows."""
    rows = rows_of(LONG_CONTEXT, observations, Residual.LINEAR)
    return problem_of(LONG_CONTEXT, rows, Procedure(huber_delta=HUBER_DELTA))


def starts(observations: Observations) -> list[FloatArray]:
    """27 sensible starts in natural amplitudes, for sizes in units of 1e8 parameters and 1e9 tokens."""
    centre = np.log(observations.sizes / _UNITS).mean(axis=0)
    points = []
    for exponents in product(_SENSIBLE, repeat=3):
        point = np.zeros(7)
        point[1:6:2] = exponents
        point[0:6:2] = observations.log_longppl.mean() / 3 * np.exp(centre * np.array(exponents))
        points.append(point)
    return points


def lmfit_objective(observations: Observations) -> float:
    """The best summed Huber loss of lmfit's ``least_squares`` with its numerical derivatives."""
    sizes, y = observations.sizes / _UNITS, observations.log_longppl

    def residuals(parameters: lmfit.Parameters) -> FloatArray:
        return log_longppl(list(parameters.valuesdict().values()), *sizes.T) - y

    best = np.inf
    for point in starts(observations):
        start = lmfit.Parameters()
        law = LONG_CONTEXT
        for name, value, low, high in zip(law.parameter_names, point, law.lower, law.upper, strict=True):
            start.add(name, value=value, min=low, max=high)
        end = lmfit.minimize(residuals, start, method="least_squares", loss="huber", f_scale=HUBER_DELTA)
        best = min(best, float(engine.huber(residuals(end.params), HUBER_DELTA).sum()))
    return best


def scipy_objective(observations: Observations) -> float:
    """The best cost of scipy's ``least_squares`` with analytic derivatives and its own scaling."""
    sizes, y = observations.sizes / _UNITS, observations.log_longppl
    logs = np.log(sizes)

    def residuals(point: FloatArray) -> FloatArray:
        missed: FloatArray = np.exp(-logs * point[1:6:2]) @ point[0:6:2] + point[6] - y
        return missed

    def jacobian(point: FloatArray) -> FloatArray:
        powers = np.exp(-logs * point[1:6:2])
        gradients = np.ones((len(y), 7))
        gradients[:, 0:6:2] = powers
        gradients[:, 1:6:2] = -logs * powers * point[0:6:2]
        return gradients

    lower, upper = np.array(LONG_CONTEXT.lower), np.array(LONG_CONTEXT.upper)
    best = np.inf
    for point in starts(observations):
        end = least_squares(
            residuals, point, jac=jacobian, bounds=(lower, upper), x_scale="jac", loss="huber", f_scale=HUBER_DELTA
        )
        best = min(best, float(end.cost))
    return best


def scipy_refits(problem: Problem, weights: FloatArray, start: FloatArray) -> FloatArray:
    """Objectives of scipy's analytic ``least_squares`` under each row of weights, warm and in our own coordinates."""
    basis, y = problem.basis, problem.log_longppl
    inside = np.clip(start, problem.lower + 1e-9, problem.upper - 1e-9)
    ends = []

    def missed(theta: FloatArray) -> FloatArray:
        residuals: FloatArray = basis.values(theta) - y
        return residuals

    for drawn in weights:

        def loss(z: FloatArray, drawn: FloatArray = drawn) -> FloatArray:
            inverse = 1 / np.sqrt(np.maximum(z, 1.0))
            curved = np.where(z <= 1, 0.0, -0.5 * inverse**3)
            rho: FloatArray = drawn * np.stack([np.where(z <= 1, z, 2 / inverse - 1), inverse, curved])
            return rho

        end = least_squares(
            missed,
            inside,
            jac=basis.jacobian,
            bounds=(problem.lower, problem.upper),
            x_scale="jac",
            loss=loss,  # type: ignore[arg-type]  # the stubs ask for a keyword that scipy never passes
            f_scale=HUBER_DELTA,
        )
        ends.append(end.cost)
    return np.array(ends, dtype=np.float64)


def measure() -> dict[str, object]:
    """All figures; CPU seconds, ratios of CPU seconds, and how far our objectives lie above the others' (relative)."""
    columns: dict[str, dict[str, float]] = {}
    for column in COLUMNS:
        observations = observations_of(column)
        ways: dict[str, Callable[[], float]] = {
            "fit": lambda rows=observations: fit(LONG_CONTEXT, rows, bootstrap_draws=0).objective,  # type: ignore[misc]
            "lmfit": lambda rows=observations: lmfit_objective(rows),  # type: ignore[misc]
            "scipy": lambda rows=observations: scipy_objective(rows),  # type: ignore[misc]
        }
        columns[column] = _in_turns(ways)
    problem = problem_for(observations_of("loss"))
    theta = engine.search(problem).theta
    weights = bootstrap.cluster_weights(np.arange(len(problem.log_longppl)), DRAWS, seed=1)
    some = weights[:SCIPY_DRAWS]
    refits = _in_turns(
        {
            "warm": lambda: float(engine.refit(problem, weights, theta).objectives[:SCIPY_DRAWS].sum()),
            "searched": lambda: float(
                engine.refit(problem, weights, theta, searched=True).objectives[:SCIPY_DRAWS].sum()
            ),
            "scipy": lambda: float(scipy_refits(problem, some, theta).sum()),
        },
        rounds=_REFIT_ROUNDS,
    )
    total = {way: sum(columns[column][way] for column in COLUMNS) for way in ("fit_s", "lmfit_s", "scipy_s")}
    scipy_s = refits["scipy_s"] * DRAWS / SCIPY_DRAWS
    excesses = [columns[c]["fit"] / min(columns[c]["lmfit"], columns[c]["scipy"]) - 1 for c in COLUMNS]
    excesses += [refits[way] / refits["scipy"] - 1 for way in ("warm", "searched")]
    return {
        "lmfit_cpu_ratio": total["lmfit_s"] / total["fit_s"],
        "scipy_analytic_cpu_ratio": total["scipy_s"] / total["fit_s"],
        "bootstrap_1000_warm_s": refits["warm_s"],
        "bootstrap_1000_searched_s": refits["searched_s"],
        "bootstrap_scipy_ratio": scipy_s / refits["warm_s"],
        "max_objective_excess": max(excesses),
        "columns": columns,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "lmfit": lmfit.__version__,
        },
    }


def _in_turns(ways: dict[str, Callable[[], float]], *, rounds: int = _ROUNDS) -> dict[str, float]:
    """What each way returns, and under its name with ``_s`` the least CPU seconds it took."""
    results: dict[str, float] = {}
    for _ in range(rounds):
        for name, run in ways.items():
            for _ in range(_TIMES.get(name, 1)):
                seconds, results[name] = _cpu_seconds(run)
                results[f"{name}_s"] = min(seconds, results.get(f"{name}_s", np.inf))
    return results


def _cpu_seconds(run: Callable[[], _T]) -> tuple[float, _T]:
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def main() -> None:
    """Print the figures as tables, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    figures = measure()
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    shown = Table("figure", "value")
    for name, value in figures.items():
        shown.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(shown)


if __name__ == "__main__":
    main()
