"""Rows to import, out of columns: lists, arrays, or a table of pandas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, TypeAlias

from api.cells import shown
from api.models_imports import ImportedObservation
from longlaw.errors import LonglawError

_COUNTS = frozenset({"n_params", "short_tokens", "long_tokens", "short_seed", "long_seed"})
#: Bytes of a float -> up to where every whole number is one of them; the service knows what holds for 8.
_EXACT = {2: 2**11, 4: 2**24}

#: Names of columns and their values; a DataFrame is one too.
Columns: TypeAlias = "Mapping[str, Iterable[Any]]"


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """One mapping for each row, without what is missing (None, NaN, NA).

    Raises:
        LonglawError: a column that observations do not have, columns of several lengths, no rows, or a value that is
            infinite, neither number nor text, or a count that its short float may have rounded.
    """
    lists = {str(name): _plain(str(name), values) for name, values in columns.items()}
    unknown = [name for name in lists if name not in ImportedObservation.model_fields]
    if unknown:
        known = ", ".join(ImportedObservation.model_fields)
        raise LonglawError(f"observations have no {', '.join(unknown)}; their columns are {known}")
    if len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{name} {len(values)}" for name, values in lists.items())
        raise LonglawError(f"all columns need the same number of rows, have {lengths}")
    if not any(lists.values()):
        raise LonglawError("there are no rows to import")
    for name, values in lists.items():
        for row, value in enumerate(values, 1):
            if not (_missing(value) or isinstance(value, int | float | str)):
                raise LonglawError(f"{name} is {shown(value)} in row {row}: only numbers and text can be imported")
            if isinstance(value, float) and math.isinf(value):
                raise LonglawError(f"{name} is {value} in row {row}: only finite numbers can be imported")
    return [
        {name: value for name, value in zip(lists, values, strict=True) if not _missing(value)}
        for values in zip(*lists.values(), strict=True)
    ]


def _plain(name: str, values: Any) -> list[Any]:
    """The values as Python's own, whoever holds them."""
    of_all = _exact_up_to(values) if name in _COUNTS else None
    if hasattr(values, "tolist"):  # arrays, and columns of pandas
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise LonglawError(f"{name} must be a list with a value for each row")
    plain = []
    for row, value in enumerate(values, 1):
        limit = of_all or (_exact_up_to(value) if name in _COUNTS else None)
        value = _own(value)
        if limit is not None and isinstance(value, float) and limit < abs(value) < math.inf:
            raise LonglawError(
                f"{name} is {value:.0f} in row {row}, a float too short to hold every number up to that: it may have"
                " been rounded; give counts as integers"
            )
        plain.append(value)
    return plain


def _exact_up_to(values: Any) -> int | None:
    """Up to where floats of this kind are exact, if they are shorter than Python's."""
    dtype: Any = getattr(values, "dtype", None)
    return _EXACT.get(dtype.itemsize) if getattr(dtype, "kind", None) == "f" else None


def _own(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    return value.item() if hasattr(value, "item") else value


def _missing(value: Any) -> bool:
    """None, NaN, or pandas' NA, which equals nothing and may not be asked."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or value != value
