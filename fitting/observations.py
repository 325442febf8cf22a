"""Observations: the rows a law is fitted to, checked once and then only arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from fitting.errors import InvalidObservationsError
from fitting.values import AXES, FloatArray, Interval, Ranges, RejectedRow

# exp of anything larger is not a finite float64: no LongPPL has such a logarithm.
_LARGEST_LOSS = 700.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Which columns of a table hold what.

    Without ``cluster``, rows with one (N, D_s) form a cluster. N and D_s may be None for a law that has no such size:
    they are 1 in every row then. A law of one stage finds its tokens D under ``long_tokens``.
    """

    n_params: str | None = "n_params"
    short_tokens: str | None = "short_tokens"
    long_tokens: str = "long_tokens"
    log_longppl: str = "log_longppl"
    cluster: str | None = None
    standard_error: str | None = None

    @property
    def sizes(self) -> tuple[str | None, str | None, str]:
        """The columns of N, D_s and D_l."""
        return (self.n_params, self.short_tokens, self.long_tokens)

    @property
    def named(self) -> tuple[str, ...]:
        """All columns that a table has to have."""
        names = (*self.sizes, self.log_longppl, self.standard_error, self.cluster)
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Observations:
    """Clean rows, float64, one entry per row in every array.

    Attributes:
        n_params: non-embedding parameters N, all positive.
        short_tokens: tokens of the short stage D_s, all positive.
        long_tokens: tokens of the long stage D_l, all positive.
        log_longppl: y in nats, any finite number.
        cluster: code of the short checkpoint a row comes from; rows of one code share its noise.
        row_ids: the rows' ids in the table they came from.
        excluded: rows of that table that are not here, with reasons.
        standard_error: of y, where the rows are to be weighted by it.
    """

    n_params: FloatArray
    short_tokens: FloatArray
    long_tokens: FloatArray
    log_longppl: FloatArray
    cluster: NDArray[np.int64]
    row_ids: tuple[int | str, ...]
    excluded: tuple[RejectedRow, ...] = ()
    standard_error: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.log_longppl)

    @property
    def sizes(self) -> FloatArray:
        """N, D_s and D_l side by side (n x 3)."""
        return np.column_stack([self.n_params, self.short_tokens, self.long_tokens])

    @property
    def n_distinct(self) -> int:
        """How many different (N, D_s, D_l) points there are."""
        return int(distinct_rows(self.sizes)[1].max()) + 1 if len(self) else 0

    @property
    def n_clusters(self) -> int:
        """How many different short checkpoints there are."""
        return len(np.unique(self.cluster))

    @property
    def ranges(self) -> Ranges:
        """The span of each axis."""
        low, high = self.sizes.min(axis=0).tolist(), self.sizes.max(axis=0).tolist()
        n_params, short_tokens, long_tokens = (Interval(low=a, high=b) for a, b in zip(low, high, strict=True))
        return Ranges(n_params=n_params, short_tokens=short_tokens, long_tokens=long_tokens)

    def repeated_rows(self) -> tuple[tuple[int | str, ...], ...]:
        """Ids of rows that repeat one another, size by size and loss by loss, as float64 sees them."""
        order, group = distinct_rows(np.column_stack([self.sizes, self.log_longppl]))
        count = np.bincount(group)
        ends = np.cumsum(count)
        return tuple(
            tuple(self.row_ids[i] for i in sorted(order[ends[g] - count[g] : ends[g]].tolist()))
            for g in np.flatnonzero(count > 1).tolist()
        )

    def subset(self, chosen: NDArray[np.bool_]) -> "Observations":
        """The chosen rows, without a word of the others."""
        return Observations(
            n_params=self.n_params[chosen],
            short_tokens=self.short_tokens[chosen],
            long_tokens=self.long_tokens[chosen],
            log_longppl=self.log_longppl[chosen],
            cluster=self.cluster[chosen],
            row_ids=tuple(row for row, kept in zip(self.row_ids, chosen.tolist(), strict=True) if kept),
            standard_error=None if self.standard_error is None else self.standard_error[chosen],
        )


def distinct_rows(rows: FloatArray) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """An order that puts equal rows next to each other, and the number of each distinct row along it.

    The same as ``np.unique`` by rows, which is many times slower.
    """
    order = np.lexsort(rows.T[::-1])
    changes = (np.diff(rows[order], axis=0) != 0).any(axis=1)
    return order, np.concatenate([[0], np.cumsum(changes)]).astype(np.intp)


def observations_from_arrays(
    n_params: ArrayLike,
    short_tokens: ArrayLike,
    long_tokens: ArrayLike,
    log_longppl: ArrayLike,
    *,
    cluster: Sequence[object] | None = None,
    row_ids: Sequence[int | str] | None = None,
) -> Observations:
    """Observations from one array (or list) per quantity; see :func:`observations_from_table` for the rules."""
    columns: dict[str, object] = {
        "n_params": n_params,
        "short_tokens": short_tokens,
        "long_tokens": long_tokens,
        "log_longppl": log_longppl,
    }
    lengths = {name: len(np.atleast_1d(np.asarray(values, dtype=object))) for name, values in columns.items()}
    if cluster is not None:
        columns["cluster"] = list(cluster)
        lengths["cluster"] = len(cluster)
    if len(set(lengths.values())) > 1:
        described = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise InvalidObservationsError(f"all columns need the same number of rows, have {described}")
    table = pd.DataFrame({name: pd.Series(np.atleast_1d(np.asarray(values))) for name, values in columns.items()})
    names = Columns(cluster=None if cluster is None else "cluster")
    return observations_from_table(table, columns=names, row_ids=row_ids)


def observations_from_table(
    table: pd.DataFrame, *, columns: Columns | None = None, row_ids: Sequence[int | str] | None = None
) -> Observations:
    """Read a table as observations; every row ends up fitted, excluded with a reason, or in the error.

    A loss that is missing, NaN, infinite or beyond +-700 nats excludes its row (a run can diverge), and so does
    D_l = 0: a short checkpoint is a diagnostic, never a point of the law. Sizes that are missing, zero or negative and
    entries that are no numbers are mistakes of the table and refuse it as a whole.

    Args:
        table: one row per observation; integers are turned into float64 before any arithmetic.
        columns: what the columns are called.
        row_ids: ids to name rows by; their numbers from 1 where absent.

    Raises:
        InvalidObservationsError: a column is missing, or rows are wrong; all of them are listed.
    """
    columns = columns or Columns()
    ids = tuple(row_ids) if row_ids is not None else tuple(range(1, len(table) + 1))
    if len(ids) != len(table):
        raise InvalidObservationsError(f"{len(ids)} row ids for {len(table)} rows")
    missing = [name for name in columns.named if name not in table.columns]
    if missing:
        present = ", ".join(str(name) for name in table.columns)
        raise InvalidObservationsError(f"no column named {', '.join(missing)}; the table has: {present}")

    wrong: dict[int, str] = {}
    left_out: dict[int, str] = {}

    def read(name: str | None) -> FloatArray:
        if name is None:
            return np.ones(len(table))
        values, not_a_number = _as_float(table[name])
        for i in np.flatnonzero(not_a_number):
            wrong.setdefault(int(i), f"{name} is {table[name].iloc[i]!r}, not a number")
        return values

    sizes = [read(name) for name in columns.sizes]
    losses = read(columns.log_longppl)
    errors = read(columns.standard_error)
    for axis, name, values in zip(AXES, columns.sizes, sizes, strict=True):
        for i in np.flatnonzero(~((values > 0) & np.isfinite(values))):
            if axis == "long_tokens" and values[i] == 0:
                left_out.setdefault(int(i), f"{name} is 0: a short checkpoint is not a point of the law")
            else:
                wrong.setdefault(int(i), f"{name} is {_shown(values[i])}; it must be positive")
    for i in np.flatnonzero(~((errors > 0) & np.isfinite(errors))):
        wrong.setdefault(int(i), f"{columns.standard_error} is {_shown(errors[i])}; it must be positive")
    for i in np.flatnonzero(~(np.abs(losses) <= _LARGEST_LOSS)):
        left_out.setdefault(int(i), f"{columns.log_longppl} is {_shown(losses[i])}")
    if columns.cluster is not None:
        for i in np.flatnonzero(table[columns.cluster].isna()):
            wrong.setdefault(int(i), f"{columns.cluster} is missing")
    if wrong:
        rejected = [RejectedRow(row=ids[i], reason=wrong[i]) for i in sorted(wrong)]
        raise InvalidObservationsError(f"{len(rejected)} rows cannot be read as observations", rejected)

    kept = np.setdiff1d(np.arange(len(table)), list(left_out)).astype(np.intp)
    n_params, short_tokens, long_tokens = (values[kept] for values in sizes)
    if columns.cluster is None:
        _, cluster = np.unique(np.column_stack([n_params, short_tokens]), axis=0, return_inverse=True)
    else:
        _, cluster = np.unique(table[columns.cluster].iloc[kept].astype(str).to_numpy(dtype=str), return_inverse=True)
    return Observations(
        n_params=n_params,
        short_tokens=short_tokens,
        long_tokens=long_tokens,
        log_longppl=losses[kept],
        cluster=cluster.ravel().astype(np.int64),
        row_ids=tuple(ids[i] for i in kept),
        excluded=tuple(RejectedRow(row=ids[i], reason=left_out[i]) for i in sorted(left_out)),
        standard_error=errors[kept] if columns.standard_error is not None else None,
    )


def _as_float(column: "pd.Series[Any]") -> tuple[FloatArray, NDArray[np.bool_]]:
    """The column as float64 (NaN where there is no number), and which entries are something else than a number."""
    values = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    return values, (np.isnan(values) & column.notna().to_numpy(dtype=bool))


def _shown(value: float) -> str:
    return "missing or NaN" if np.isnan(value) else f"{value:g}"
