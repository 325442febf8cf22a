"""Rows for tests of this package and its users: series, observations that follow a known law, cells, segments."""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from sqlalchemy import func
from sqlalchemy.orm import Session

from database.fits import load_job, series_observations, store_fit
from database.models import (
    Cell,
    CellEvaluation,
    Evaluation,
    Evaluator,
    Fit,
    FitObservation,
    Grid,
    GridEvaluation,
    Observation,
    Scheduler,
    Segment,
    Series,
)
from fitting.predict import log_longppl
from orchestrator.fit_job import fit_job

#: A, alpha, B_s, beta_s, B_l, beta_l, C of the observations made here.
TRUTH = (67.0, 0.25, 238.0, 0.30, 45.0, 0.20, -0.40)
SCALES = {"S1": 31_000_000, "S2": 66_000_000, "S3": 126_000_000, "S4": 243_000_000}


def add_series(session: Session, series_id: str = "series", *, metric: str = "log_longppl") -> str:
    if session.get(Evaluator, "evaluator") is None:
        session.add(Evaluator(id="evaluator", spec={}))
        session.flush()
    session.add(
        Series(
            id=series_id,
            family="family",
            protocol="constant",
            rule="raw",
            evaluator_id="evaluator",
            metric=metric,
            label=f"{series_id} in words",
        )
    )
    session.flush()
    return series_id


def points(
    scales: Sequence[str] = ("S1", "S2", "S3"),
    short: Sequence[int] = (90, 180, 270),
    long: Sequence[int] = (10, 20, 30, 40),
) -> Iterator[tuple[str, int, int, int]]:
    """Scale, N, D_s and D_l for budgets in multiples of N."""
    for scale, s, ell in product(scales, short, long):
        yield scale, SCALES[scale], s * SCALES[scale], ell * SCALES[scale]


def add_observations(
    session: Session,
    series_id: str,
    sizes: Iterator[tuple[str, int, int, int]] | None = None,
    *,
    parameters: Sequence[float] = TRUTH,
    noise: float = 0.01,
    seed: int = 0,
    created_at: Any = None,
) -> list[int]:
    """Observations of the law `parameters` with normal noise in nats; returns their ids."""
    rng = np.random.default_rng(seed)
    rows = [
        Observation(
            series_id=series_id,
            scale=scale,
            n_params=n,
            short_tokens=d_s,
            long_tokens=d_l,
            short_seed=0,
            long_seed=seed,
            cluster=f"{scale}-{d_s}",
            y=float(log_longppl(parameters, n, d_s, d_l)) + float(noise * rng.standard_normal()),
            source="imported",
            **({} if created_at is None else {"created_at": created_at}),
        )
        for scale, n, d_s, d_l in (points() if sizes is None else sizes)
    ]
    session.add_all(rows)
    session.flush()
    return [row.id for row in rows]


def add_grid(session: Session, *, holdout: str | None = None, bootstrap: int = 40, name: str = "grid") -> uuid.UUID:
    grid = Grid(
        name=name,
        protocol="constant",
        document={},
        document_hash="hash",
        tokens_train=1,
        tokens_independent=1,
        flops=1.0,
        gpu_hours=1.0,
        holdout=holdout,
        bootstrap=bootstrap,
    )
    session.add(grid)
    session.flush()
    return grid.id


def add_cell(session: Session, grid_id: uuid.UUID, series_id: str, evaluation_keys: Sequence[str], **given: Any) -> int:
    values: dict[str, Any] = {
        "key": "+".join(evaluation_keys),
        "scale": "S1",
        "n_params": SCALES["S1"],
        "short_tokens": 90 * SCALES["S1"],
        "long_tokens": 10 * SCALES["S1"],
        "short_seed": 0,
        "long_seed": 0,
        "plan_status": "new",
    }
    cell = Cell(grid_id=grid_id, **values | given)
    session.add(cell)
    session.flush()
    for key in evaluation_keys:
        session.add(CellEvaluation(cell_id=cell.id, evaluation_key=key, series_id=series_id))
        session.merge(GridEvaluation(grid_id=grid_id, evaluation_key=key))
    session.flush()
    return cell.id


def segment(key: str, **given: Any) -> Segment:
    values: dict[str, Any] = {
        "generation": 1,
        "kind": "long_constant",
        "scale": "S1",
        "spec": {"seed": 7},
        "tokens_per_step": 1000,
        "target_step": 100,
    }
    return Segment(key=key, **_closed(values | given))


def evaluation(key: str, **given: Any) -> Evaluation:
    values: dict[str, Any] = {
        "generation": 1,
        "snapshot_id": f"snapshot of {key}",
        "segment_key": "segment",
        "step": 100,
        "rule": {"name": "last_m", "m": 4, "spacing_steps": 25},
        "evaluator_id": "evaluator",
        "scale": "S1",
        "n_params": SCALES["S1"],
        "short_tokens": 90 * SCALES["S1"],
        "long_tokens": 10 * SCALES["S1"],
        "short_seed": 0,
        "long_seed": 0,
        "cluster": "short checkpoint",
    }
    if given.get("state") == "SUCCEEDED":
        values |= {"log_longppl": 1.5, "log_shortppl": 2.0, "log_ppl": 2.5}
        values |= {"key_count": 10, "short_count": 20, "all_count": 30}
    return Evaluation(key=key, **_closed(values | given))


def _closed(values: dict[str, Any]) -> dict[str, Any]:
    if values.get("state") in ("SUCCEEDED", "FAILED", "CANCELLED"):
        values.setdefault("ended_at", func.now())
    return values


def add_fit(
    session: Session, series_id: str, *, holdout: str | None = None, bootstrap: int = 40, **replaced: Any
) -> uuid.UUID:
    """A real fit of all observations that the series has now, stored with some of its numbers `replaced`."""
    rows = series_observations(session, series_id)
    fit = Fit(
        series_id=series_id,
        law="long_context",
        holdout=holdout,
        bootstrap=bootstrap,
        state="RUNNING",
        last_observation_id=rows[-1].id,
        created_at=func.clock_timestamp(),
    )
    session.add(fit)
    session.flush()
    session.add_all([FitObservation(fit_id=fit.id, observation_id=row.id) for row in rows])
    session.flush()
    job = load_job(session, fit.id)
    assert job is not None
    result = fit_job(job)
    assert store_fit(session, fit.id, replace(result, fit=replace(result.fit, **replaced)))
    return fit.id


def add_scheduler(session: Session) -> uuid.UUID:
    scheduler = Scheduler(id=uuid.uuid4(), host="host", pid=1, workers=1, leading=True)
    session.add(scheduler)
    session.flush()
    return scheduler.id
