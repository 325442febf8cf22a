"""How often 90 % intervals hold the truth, for noise that the rows of one short checkpoint share.

Data sets follow a known law on the paper's grid, with noise of 0.8 % per (N, D_s) and 0.6 % per row. Four scales are
fitted, the fifth is predicted. ``python -m benchmarks.fitting_coverage [--sets 200] [--draws 400] [--json]``.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from fitting.joint import fit
from fitting.laws import LONG_CONTEXT
from fitting.observations import Columns, Observations, observations_from_table
from fitting.predict import predict_all
from fitting.values import FloatArray, Point, Resampled

TABLE = Path(__file__).parents[1] / "tests" / "data" / "synthetic_paper_grid.csv"
TRUTH = (67.0, 0.25, 238.0, 0.30, 45.0, 0.20, -0.40)
LEVEL = 0.9
_SHARED, _OWN = 0.008, 0.006
_WATCHED = ("alpha", "beta_s", "beta_l", "C")


def grid(*, held_out: bool) -> Observations:
    """The noiseless losses of the four scales, or of the fifth."""
    table = pd.read_csv(TABLE)
    columns = Columns(n_params="N", short_tokens="Ds", long_tokens="Dl", log_longppl="loss_true")
    return observations_from_table(table[table.held_out == int(held_out)], columns=columns)


def noise(rows: Observations, seed: int) -> FloatArray:
    """Noise that rows of one short checkpoint share, and noise of their own."""
    generator = np.random.default_rng([11, seed])
    shared: FloatArray = generator.normal(0, _SHARED, rows.n_clusters)[rows.cluster]
    return shared + generator.normal(0, _OWN, len(rows))


def held(rows: Observations, target: Observations, seed: int, draws: int, resampled: Resampled) -> dict[str, float]:
    """For one data set, which intervals hold the truth: one or zero, for the predictions their share."""
    noisy = replace(rows, log_longppl=rows.log_longppl + noise(rows, seed))
    result = fit(LONG_CONTEXT, noisy, bootstrap_draws=draws, seed=seed, level=LEVEL, resampled=resampled)
    points = [Point(n_params=n, short_tokens=s, long_tokens=d) for n, s, d in target.sizes.tolist()]
    spans = [said.interval for said in predict_all(result, points, level=LEVEL)]
    inside = [s is not None and s.low <= y <= s.high for s, y in zip(spans, target.log_longppl.tolist(), strict=True)]
    answer = {"S5": float(np.mean(inside))}
    for name, truth, span in zip(LONG_CONTEXT.parameter_names, TRUTH, result.intervals, strict=True):
        if name in _WATCHED:
            answer[name] = float(span is not None and span.low <= truth <= span.high)
    return answer


def coverage(sets: int, draws: int, resampled: Resampled) -> dict[str, float]:
    """The share of intervals that hold the truth, over so many data sets."""
    rows, target = grid(held_out=False), grid(held_out=True)
    answers = [held(rows, target, seed, draws, resampled) for seed in range(sets)]
    return {name: float(np.mean([answer[name] for answer in answers])) for name in answers[0]}


def main() -> None:
    """Print coverage of both ways to resample."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    start = time.process_time()
    figures: dict[str, object] = {
        resampled.value: coverage(asked.sets, asked.draws, resampled) for resampled in Resampled
    }
    figures |= {"sets": asked.sets, "draws": asked.draws, "cpu_s": time.process_time() - start}
    print(json.dumps(figures, indent=2) if asked.json else "\n".join(f"{k}: {v}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
