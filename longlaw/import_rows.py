"""Rows to import, out of columns: lists, arrays, or a table of pandas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from api.models_imports import ImportedObservation
from longlaw.errors import LonglawError

#: Names of columns and their values; a DataFrame is one too.
Columns: TypeAlias = "Mapping[str, Iterable[Any]]"


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """One mapping for each row, without what is missing (None, NaN, NA).

    Raises:
        LonglawError: a column that observations do not have, columns of several lengths, or an infinite value.
    """
    lists = {str(name): _plain(name, values) for name, values in columns.items()}
    unknown = [name for name in lists if name not in ImportedObservation.model_fields]
    if unknown:
        known = ", ".join(ImportedObservation.model_fields)
        raise LonglawError(f"observations have no {', '.join(unknown)}; their columns are {known}")
    if len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{name} {len(values)}" for name, values in lists.items())
        raise LonglawError(f"all columns need the same number of rows, have {lengths}")
    for name, values in lists.items():
        for row, value in enumerate(values, 1):
            if isinstance(value, float) and math.isinf(value):
                raise LonglawError(f"{name} is {value} in row {row}: only finite numbers can be imported")
    return [
        {name: value for name, value in zip(lists, values, strict=True) if not _missing(value)}
        for values in zip(*lists.values(), strict=True)
    ]


def _plain(name: object, values: Any) -> list[Any]:
    """The values as Python's own, whoever holds them."""
    if hasattr(values, "tolist"):  # arrays, and columns of pandas
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise LonglawError(f"{name} must be a list with a value for each row")
    return [value.item() if hasattr(value, "item") else value for value in values]


def _missing(value: Any) -> bool:
    """None, NaN, or pandas' NA, which equals nothing and may not be asked."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or value != value
