"""Held-out rows: chosen by the reader, predicted, never fitted."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fitting.errors import InvalidSelectionError
from fitting.laws import LONG_CONTEXT, Law
from fitting.observations import Observations
from fitting.predict import law_values
from fitting.values import FloatArray, Holdout


def select_rows(table: pd.DataFrame, selection: str) -> NDArray[np.bool_]:
    """Which rows of a table a selection ``COL=VALUE`` names.

    Numbers compare as numbers (``held_out=1`` and ``N=8.21e8`` select what they say), everything else as text.

    Raises:
        InvalidSelectionError: no such form, no such column, or no row has that value.
    """
    name, separator, value = selection.partition("=")
    name, value = name.strip(), value.strip()
    if not separator or not name:
        raise InvalidSelectionError(f"{selection!r} is not of the form COL=VALUE")
    if name not in table.columns:
        raise InvalidSelectionError(f"no column named {name}; the table has: {', '.join(map(str, table.columns))}")
    column = table[name]
    chosen = (column.astype(str) == value).to_numpy(dtype=bool)
    try:
        number = float(value)
    except ValueError:
        pass
    else:
        numbers = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
        chosen = chosen | (numbers == number)
    if not chosen.any():
        present = ", ".join(sorted(column.astype(str).unique())[:10])
        raise InvalidSelectionError(f"no row has {name}={value}; its values begin {present}")
    return chosen


def evaluate(parameters: Sequence[float], observations: Observations, law: Law = LONG_CONTEXT) -> Holdout:
    """Compare a law's predictions with observations that it was not fitted to (at least one)."""
    return score(law_values(law, parameters, *observations.sizes.T), observations.log_longppl)


def score(predicted: FloatArray, y: FloatArray) -> Holdout:
    """Compare predictions with measured losses (at least one)."""
    with np.errstate(over="ignore", invalid="ignore"):
        mape_ppl = float(100 * np.abs(np.expm1(predicted - y)).mean())
    return Holdout(
        n_observations=len(y),
        r2=r_squared(predicted, y),
        mape_log=mape_percent(predicted, y),
        mape_ppl=mape_ppl if np.isfinite(mape_ppl) else None,
        bias=float((predicted - y).mean()),
    )


def r_squared(predicted: FloatArray, y: FloatArray) -> float | None:
    """1 - SS_res/SS_tot about the mean of y; None where y does not vary."""
    total = float(((y - y.mean()) ** 2).sum())
    return 1 - float(((y - predicted) ** 2).sum()) / total if total > 0 else None


def mape_percent(predicted: FloatArray, y: FloatArray) -> float | None:
    """100/n * sum |predicted - y|/|y|; None where some y is zero."""
    return float(100 * (np.abs(predicted - y) / np.abs(y)).mean()) if (y != 0).all() else None
