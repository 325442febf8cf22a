"""What answering predictions costs the service and its client, beside one object for each point.

``python -m benchmarks.predicting [--json]`` prints and writes nothing. Both ways answer the same bytes from the same
fit of 200 bootstrap draws, in one interleaved run; CPU time, since machines are shared.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from pyarrow import BufferReader, csv
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from api.models import Axes, PredictedPoint, Predictions
from api.prediction_answers import Sizes, csv_chunks, json_chunks
from fitting.predict import predict_all
from fitting.values import FittedLaw, Interval, Point, Prediction, Ranges

POINTS, DRAWS, REPEATS, BLOCK = 30_000, 200, 5, 5_000

_PARAMETERS = (60.0, 0.25, 200.0, 0.3, 40.0, 0.2, 1.5)
LAW = FittedLaw(
    law="long_context",
    parameters=_PARAMETERS,
    draws=np.array(_PARAMETERS) * (1 + 0.02 * np.random.default_rng(0).standard_normal((DRAWS, 7))),
    ranges=Ranges(
        n_params=Interval(low=1e8, high=4e8),
        short_tokens=Interval(low=1e9, high=2e10),
        long_tokens=Interval(low=1e8, high=1e10),
    ),
    residual_std=0.01,
    not_identifiable=(),
)
HEAD = Predictions(fit_id="0", series_id="0", law=LAW.law, status="CONVERGED", level=0.9, warnings=(), predictions=())
_points = TypeAdapter(list[PredictedPoint])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU microseconds for each point, the median of the repeats, and how many times less than with objects."""

    where: str
    way: str
    cpu_us: float
    times_less: float


def anywhere() -> Sizes:
    """Points all over the space, half of them outside of what was fitted."""
    rng = np.random.default_rng(1)
    n_params, short_tokens, long_tokens = (
        np.exp(rng.uniform(np.log(low), np.log(high), POINTS)) for low, high in ((5e7, 1e9), (5e8, 1e11), (5e7, 1e11))
    )
    return n_params, short_tokens, long_tokens


def sweep() -> Sizes:
    """One axis inside of what was fitted, the others fixed."""
    return np.array([2e8]), np.array([1e10]), np.geomspace(1e8, 1e10, POINTS)


def object_for_each(at: Sizes) -> bytes:
    """The answer by way of values and models of single points."""
    columns = [np.broadcast_to(size, POINTS).tolist() for size in at]
    text = HEAD.model_dump_json().removesuffix("]}").encode()
    for start in range(0, POINTS, BLOCK):
        points = [
            Point(n_params=n, short_tokens=short, long_tokens=long)
            for n, short, long in zip(*(column[start : start + BLOCK] for column in columns), strict=True)
        ]
        said = [_point(one) for one in predict_all(LAW, points)]
        text += (b"," if start else b"") + _points.dump_json(said)[1:-1]
    return text + b"]}"


def _point(said: Prediction) -> PredictedPoint:
    assert said.interval is not None
    assert said.prediction_interval is not None
    return PredictedPoint(
        n_params=said.at.n_params,
        short_tokens=said.at.short_tokens,
        long_tokens=said.at.long_tokens,
        log_longppl=said.value,
        longppl=math.exp(said.value),
        low=said.interval.low,
        high=said.interval.high,
        prediction_low=said.prediction_interval.low,
        prediction_high=said.prediction_interval.high,
        extrapolation=Axes(
            n_params=said.extrapolation.n_params,
            short_tokens=said.extrapolation.short_tokens,
            long_tokens=said.extrapolation.long_tokens,
        ),
        determined=said.determined,
        warnings=said.warnings,
    )


def measure(points: str, at: Sizes) -> list[Cost]:
    """Answers the points in every way, and reads the answers in every way."""
    as_json, as_csv = b"".join(json_chunks(HEAD, LAW, at)), b"".join(csv_chunks(LAW, at, level=HEAD.level))
    assert as_json == object_for_each(at)
    ways: dict[str, dict[str, Callable[[], object]]] = {
        f"answer, {points}": {
            "object for each": lambda: object_for_each(at),
            "columns, JSON": lambda: b"".join(json_chunks(HEAD, LAW, at)),
            "columns, CSV": lambda: b"".join(csv_chunks(LAW, at, level=HEAD.level)),
        },
        f"read, {points}": {
            "object for each": lambda: Predictions.model_validate_json(as_json),
            "columns, CSV": lambda: csv.read_csv(BufferReader(as_csv)).to_pandas(),
        },
    }
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        for where, calls in ways.items():
            for way, call in calls.items():
                began = time.process_time()
                call()
                taken[where, way].append((time.process_time() - began) / POINTS * 1e6)
    costs = []
    for (where, way), times in taken.items():
        cpu_us, before_us = statistics.median(times), statistics.median(taken[where, "object for each"])
        costs.append(Cost(where=where, way=way, cpu_us=cpu_us, times_less=before_us / cpu_us))
    return costs


def main() -> None:
    """Print the costs as a table, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    costs = [*measure("anywhere", anywhere()), *measure("one axis", sweep())]
    if as_json:
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        print(json.dumps({"versions": versions, "costs": [asdict(cost) for cost in costs]}, indent=2))
        return
    shown = Table("what", "way", "CPU us a point", "times less")
    for cost in costs:
        shown.add_row(cost.where, cost.way, f"{cost.cpu_us:.1f}", f"{cost.times_less:.1f}")
    Console().print(shown)


if __name__ == "__main__":
    main()
