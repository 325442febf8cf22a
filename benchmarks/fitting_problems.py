"""Random problems on which a search is held against many analytic starts of scipy's ``least_squares``.

Tables of 12 to 100 rows, noise of 0.1 to 6 %, outliers in 40 %, the one-sided penalty in half, true exponents anywhere
in [0.01, 2]. ``python -m benchmarks.fitting_problems [--problems 280] [--starts 40] [--json]``.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from fitting import engine
from fitting.basis import Basis
from fitting.engine import Problem
from fitting.identifiability import varied_axes
from fitting.values import FloatArray

HUBER_DELTA = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A problem's best objective from either side, and the CPU seconds each took."""

    seed: int
    ours: float
    theirs: float
    excess: float
    on_bound: bool
    converged: bool
    ours_cpu_s: float
    theirs_cpu_s: float


def random_problem(seed: int) -> Problem:
    """The problem of that seed."""
    generator = np.random.default_rng([20_260_107, seed])
    n = int(generator.integers(12, 101))
    levels = [np.sort(np.exp(generator.uniform(np.log(low), np.log(high), 5))) for low, high in _SPANS]
    sizes = np.column_stack([generator.choice(values, n) for values in levels])
    # a table whose axes do not all take three values is another kind of problem
    sizes[:15] = np.array([[values[k % 5] for values in levels] for k in range(15)])[: len(sizes)]
    sizes[5:10, 1], sizes[10:15, 2] = np.roll(sizes[5:10, 1], 2), np.roll(sizes[10:15, 2][: max(n - 10, 0)], 1)
    basis = Basis.of(sizes, varied_axes(sizes))
    exponents = np.exp(generator.uniform(np.log(0.01), np.log(2.0), 3))
    shapes = basis.columns(exponents)[:, :3]
    falls = generator.uniform(0.02, 0.6, 3) / np.maximum(np.ptp(shapes, axis=0), 1e-9)
    y = shapes @ falls + generator.uniform(0.3, 2.5)
    y = y + np.exp(generator.uniform(np.log(1e-3), np.log(6e-2))) * generator.standard_normal(n)
    if generator.random() < 0.4:
        wild = generator.random(n) < 0.06
        y = np.where(wild, y + generator.choice([-1, 1], n) * generator.uniform(0.1, 0.5, n), y)
    lower, upper = basis.bounds
    problem = Problem(
        basis=basis,
        log_longppl=y,
        weights=np.ones(n),
        huber_delta=HUBER_DELTA,
        lower=lower,
        upper=upper,
        varied=varied_axes(sizes),
    )
    if generator.random() < 0.5:
        references = np.full(7, np.inf)
        references[[3, 5]] = generator.uniform(0.02, 0.6, 2)
        problem = replace(problem, strength=10 ** generator.uniform(-2, 2), references=references)
    return problem


def scipy_best(problem: Problem, n_starts: int, seed: int = 0) -> float:
    """The least objective of bounded trust-region descents with analytic derivatives, from random exponents.

    The penalty's residuals keep their square where those of the rows have the Huber loss.
    """
    generator = np.random.default_rng([7, seed])
    basis, y, n = problem.basis, problem.log_longppl, len(problem.log_longppl)
    references = np.full(7, np.inf) if problem.references is None else problem.references
    penalised = np.flatnonzero(np.isfinite(references))
    root = np.sqrt(problem.strength)

    def residuals(theta: FloatArray) -> FloatArray:
        excess = root * np.maximum(theta[penalised] - references[penalised], 0.0)
        return np.concatenate([basis.values(theta) - y, excess])

    def jacobian(theta: FloatArray) -> FloatArray:
        rows = np.zeros((len(penalised), 7))
        rows[np.arange(len(penalised)), penalised] = root * (theta[penalised] > references[penalised])
        return np.vstack([basis.jacobian(theta), rows])

    def loss(z: FloatArray) -> FloatArray:
        rho = np.stack([z, np.ones_like(z), np.zeros_like(z)])
        beyond = np.flatnonzero(z[:n] > 1)
        rho[0, beyond] = 2 * np.sqrt(z[beyond]) - 1
        rho[1, beyond] = z[beyond] ** -0.5
        rho[2, beyond] = -0.5 * z[beyond] ** -1.5
        return rho

    best = np.inf
    spread = np.where(basis.logs.std(axis=0) > 0, basis.logs.std(axis=0), 1.0)
    for _ in range(n_starts):
        start = np.empty(7)
        start[[1, 3, 5]] = np.exp(generator.uniform(np.log(0.03), np.log(1.6), 3))
        start[[0, 2, 4]] = y.std() / spread * generator.uniform(0.1, 1.0, 3)
        start[6] = y.mean()
        end = least_squares(
            residuals,
            start,
            jac=jacobian,
            bounds=(problem.lower, problem.upper),
            x_scale="jac",
            loss=loss,  # type: ignore[arg-type]  # the stubs ask for a keyword that scipy never passes
            f_scale=problem.huber_delta,
            ftol=1e-13,
            xtol=1e-13,
            gtol=1e-13,
            max_nfev=400,
        )
        best = min(best, float(end.cost))
    return best


def outcome(seed: int, n_starts: int) -> Outcome:
    """Both sides on one problem."""
    problem = random_problem(seed)
    start = time.process_time()
    found = engine.search(problem)
    between = time.process_time()
    theirs = scipy_best(problem, n_starts, seed)
    end = time.process_time()
    return Outcome(
        seed=seed,
        ours=found.objective,
        theirs=theirs,
        excess=found.objective / theirs - 1,
        on_bound=bool(found.on_bound.any()),
        converged=found.converged,
        ours_cpu_s=between - start,
        theirs_cpu_s=end - between,
    )


_SPANS = ((3e7, 8e8), (2e9, 4e11), (3e8, 4e10))


def main() -> None:
    """Print how often, and by how much, either side was lower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", type=int, default=280)
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    outcomes = [outcome(seed, asked.starts) for seed in range(asked.problems)]
    excess = np.array([item.excess for item in outcomes])
    summary = {
        "problems": len(outcomes),
        "starts": asked.starts,
        "max_objective_excess": float(excess.max()),
        "above_1e-9": int((excess > 1e-9).sum()),
        "lower_by_1e-9": int((excess < -1e-9).sum()),
        "on_bound": int(sum(item.on_bound for item in outcomes)),
        "not_converged": int(sum(not item.converged for item in outcomes)),
        "cpu_ratio": sum(item.theirs_cpu_s for item in outcomes) / sum(item.ours_cpu_s for item in outcomes),
        "worst_seeds": [int(k) for k in np.argsort(-excess)[:5]],
    }
    print(json.dumps(summary, indent=2) if asked.json else "\n".join(f"{k}: {v}" for k, v in summary.items()))


if __name__ == "__main__":
    main()
