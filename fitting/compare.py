"""Several laws, and predictions that need no law, on the same rows: one call, one table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from fitting import engine
from fitting.errors import InvalidObservationsError, NotEnoughObservationsError
from fitting.holdout import mape_percent, r_squared, score
from fitting.joint import fit
from fitting.laws import VARIANTS, Law
from fitting.observations import Observations
from fitting.predict import law_values
from fitting.values import Fit, FloatArray, Holdout, Residual, Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One line of a comparison.

    Attributes:
        name: of the law, or of the baseline.
        n_parameters: how many numbers it takes from the rows.
        status: how the fit ended; None for a baseline and for a law with too many parameters for the rows.
        objective: summed Huber loss on the fitted rows.
        bic: n log(2F/n) + k log n with that loss in place of half the squares; None where it says nothing.
        r2: on the fitted rows.
        mape_log: of y on the fitted rows, in percent.
        holdout: how it predicts the held-out rows.
    """

    name: str
    n_parameters: int
    status: Status | None
    objective: float | None
    bic: float | None
    r2: float | None
    mape_log: float | None
    holdout: Holdout | None


def compare(
    observations: Observations,
    holdout: Observations | None = None,
    *,
    laws: Sequence[Law] = VARIANTS,
    huber_delta: float = 0.05,
    residual: Residual = Residual.LINEAR,
) -> tuple[Contender, ...]:
    """Fit each law to the same rows with the same loss and no penalty, beside three baselines.

    The baselines are the mean of y, the y of the nearest observation (in logarithms of the sizes), and a plane in those
    logarithms. Contenders come in order of their held-out error in LongPPL, or of their BIC where nothing was held out.
    Training errors are low for nearly any law and rank nothing.

    Raises:
        InvalidObservationsError: no usable row, or none held out.
    """
    if len(observations) == 0 or (holdout is not None and len(holdout) == 0):
        raise InvalidObservationsError("there is nothing to compare on: no row has a usable loss")
    contenders = [_law(law, observations, holdout, huber_delta, residual) for law in laws]
    y, logs = observations.log_longppl, _logs(observations, observations)
    elsewhere = None if holdout is None else _logs(observations, holdout)
    plane = np.linalg.lstsq(np.column_stack([logs, np.ones(len(y))]), y, rcond=None)[0]
    for name, size, predict in (
        ("mean of y", 1, lambda at, _: np.full(len(at), y.mean())),
        ("nearest observation", 0, lambda at, own: y[_nearest(logs, at, own)]),
        ("plane in logarithms", len(plane), lambda at, _: at @ plane[:-1] + plane[-1]),
    ):
        scored = None
        if holdout is not None and elsewhere is not None:
            scored = score(predict(elsewhere, False), holdout.log_longppl)
        predicted = predict(logs, True)
        loss = _loss(predicted, y, huber_delta, residual)
        contenders.append(_contender(name, size, None, loss, predicted, y, scored))
    return tuple(sorted(contenders, key=_rank))


def bic(objective: float, n: int, size: int) -> float:
    """n log(2F/n) + k log n: Schwarz's criterion with twice the objective in place of the sum of squares."""
    return n * float(np.log(2 * objective / n)) + size * float(np.log(n))


def _law(
    law: Law, observations: Observations, holdout: Observations | None, huber_delta: float, residual: Residual
) -> Contender:
    try:
        result: Fit = fit(
            law, observations, huber_delta=huber_delta, residual=residual, bootstrap_draws=0, holdout=holdout
        )
    except NotEnoughObservationsError:
        return Contender(
            name=law.name,
            n_parameters=law.n_parameters,
            status=None,
            objective=None,
            bic=None,
            r2=None,
            mape_log=None,
            holdout=None,
        )
    predicted = law_values(law, result.parameters, *observations.sizes.T)
    y = observations.log_longppl
    return _contender(law.name, law.n_parameters, result.status, result.objective, predicted, y, result.holdout)


def _contender(
    name: str,
    size: int,
    status: Status | None,
    objective: float,
    predicted: FloatArray,
    y: FloatArray,
    holdout: Holdout | None,
) -> Contender:
    n = len(y)
    return Contender(
        name=name,
        n_parameters=size,
        status=status,
        objective=objective,
        bic=bic(objective, n, size) if objective > 0 and n > size else None,
        r2=r_squared(predicted, y),
        mape_log=mape_percent(predicted, y),
        holdout=holdout,
    )


def _loss(predicted: FloatArray, y: FloatArray, huber_delta: float, residual: Residual) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        residuals = predicted - y if residual is Residual.LINEAR else np.log(predicted / y)
    total = float(engine.huber(residuals, huber_delta).sum())
    return total if np.isfinite(total) else float("inf")


def _logs(reference: Observations, rows: Observations) -> FloatArray:
    """Centred logarithms of the sizes that vary (n x axes)."""
    varied = np.ptp(reference.sizes, axis=0) > 0
    logs: FloatArray = np.log(rows.sizes[:, varied]) - np.log(reference.sizes[:, varied]).mean(axis=0)
    return logs


def _nearest(logs: FloatArray, at: FloatArray, own: bool) -> NDArray[np.intp]:
    """Positions of the nearest observations; for the observations themselves, of their nearest neighbours."""
    if not logs.shape[1]:
        return np.zeros(len(at), dtype=np.intp)
    positions = KDTree(logs).query(at, k=2 if own and len(logs) > 1 else 1)[1].reshape(len(at), -1)
    chosen: NDArray[np.intp] = positions[:, 0]
    if own and positions.shape[1] == 2:
        chosen = np.where(chosen == np.arange(len(at)), positions[:, 1], chosen)
    return chosen


def _rank(contender: Contender) -> tuple[bool, float]:
    error = contender.holdout.mape_ppl if contender.holdout is not None else contender.bic
    return (error is None, 0.0 if error is None else error)
