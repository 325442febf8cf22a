"""One fit, in a process of its own: `python -m orchestrator.fit_job FIT_ID`, niced.

The process finds the database in `LONGLAW_DATABASE_URL`; a command line would show the password to every user of the
machine. It needs numpy and scipy, neither torch nor Ray.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence

from sqlalchemy import NullPool
from sqlalchemy.exc import OperationalError

from database.engine import create_engine, session_factory
from database.fits import FitJob, FitResult, FitUse, SeriesObservation, fail_fit, held_out, load_job, store_fit
from database.settings import Settings
from fitting.errors import FittingError
from fitting.explain import explain
from fitting.joint import fit
from fitting.observations import Observations, observations_from_arrays
from fitting.predict import predict_all
from fitting.values import Fit, Point

_NICENESS = 10
_NO_SHORT_TOKENS = "D_s of their model is unknown, so they serve the law of one trajectory alone"


def fit_job(job: FitJob) -> FitResult:
    """Fits a job's law to its frozen observations.

    The same observations give the same numbers, bit for bit, in whatever order they came: every fit resamples with one
    seed, so that intervals move from one fit of a series to the next by what was added, not by chance.

    Raises:
        FittingError: the observations cannot be fitted.
    """
    usable = [row for row in job.observations if row.short_tokens is not None]
    without = [row for row in job.observations if row.short_tokens is None]
    apart = held_out(usable, job.holdout)
    rows = [row for row, out in zip(usable, apart, strict=True) if not out]
    kept_from_fit = [row for row, out in zip(usable, apart, strict=True) if out]
    fitted = fit(
        job.law,
        _as_observations(rows),
        bootstrap_draws=job.bootstrap,
        holdout=_as_observations(kept_from_fit) if job.holdout is not None else None,
    )
    explanation = explain(fitted)
    if without:
        explanation.append(f"{len(without)} observations are left out: {_NO_SHORT_TOKENS}.")
    left_out = (FitUse(observation_id=row.id, role="excluded", reason=_NO_SHORT_TOKENS) for row in without)
    return FitResult(fit=fitted, explanation=tuple(explanation), uses=(*_uses(usable, apart, fitted), *left_out))


def _as_observations(rows: Sequence[SeriesObservation]) -> Observations:
    return observations_from_arrays(
        [row.n_params for row in rows],
        [_short_tokens(row) for row in rows],
        [row.long_tokens for row in rows],
        [row.y for row in rows],
        cluster=[row.cluster for row in rows],
        row_ids=[row.id for row in rows],
    )


def _short_tokens(row: SeriesObservation) -> int:
    assert row.short_tokens is not None, "rows without D_s are left out before"
    return row.short_tokens


def _uses(rows: Sequence[SeriesObservation], apart: Sequence[bool], fitted: Fit) -> tuple[FitUse, ...]:
    excluded = {item.row: item.reason for item in fitted.excluded}
    points = [Point(n_params=r.n_params, short_tokens=_short_tokens(r), long_tokens=r.long_tokens) for r in rows]
    uses = []
    for row, out, said in zip(rows, apart, predict_all(fitted, points, level=fitted.level), strict=True):
        role = "excluded" if row.id in excluded else "held_out" if out else "fitted"
        uses.append(
            FitUse(
                observation_id=row.id,
                role=role,
                reason=excluded.get(row.id),
                predicted=said.value,
                low=said.interval.low if said.interval is not None else None,
                high=said.interval.high if said.interval is not None else None,
            )
        )
    return tuple(uses)


def run_fit(database_url: str, fit_id: uuid.UUID) -> bool:
    """Does a RUNNING fit and stores what it comes to; no connection is held meanwhile.

    A fit that cannot be done ends as FAILED with the reason.

    Returns:
        Whether this call ended the fit; False where there is none of that id or it was not RUNNING (any more).
    """
    engine = create_engine(database_url, application_name="longlaw-fit", poolclass=NullPool)
    sessions = session_factory(engine)
    with sessions() as session:
        job = load_job(session, fit_id)
    if job is None:
        return False
    try:
        result = fit_job(job)
        with sessions.begin() as session:
            return store_fit(session, fit_id, result)
    except FittingError as error:
        with sessions.begin() as session:
            return fail_fit(session, fit_id, str(error))
    except OperationalError:  # the server's trouble, not the fit's: it is tried again
        raise
    except Exception as error:
        with sessions.begin() as session:
            fail_fit(session, fit_id, f"{type(error).__name__}: {error}")
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Does one fit. Returns 0 when it has ended, as SUCCEEDED or as FAILED, and 1 where the database is gone."""
    (fit_id,) = sys.argv[1:] if arguments is None else arguments
    url = Settings().database_url
    if url is None:
        print("LONGLAW_DATABASE_URL is not set", file=sys.stderr)
        return 2
    try:
        run_fit(url.get_secret_value(), uuid.UUID(fit_id))
    except OperationalError as error:
        print(f"the database is gone: {error.orig}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.nice(_NICENESS)
    sys.exit(main())
