"""Predictions as JSON and as CSV, a block of points at a time and column by column: no object stands for a point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np
from pydantic_core import to_json

from api.models import PredictedPoint, Predictions
from api.models_predictions import FloatArray
from fitting.predict import predict_columns
from fitting.values import AXES, FittedLaw, PredictedColumns

_BLOCK = 5_000  # points predicted and sent at a time: what bounds the memory of one request
_LARGEST = 700.0  # its exponential is about the largest that a double holds
_NULL = b"null"

Sizes = tuple[FloatArray, FloatArray, FloatArray]

#: The columns of the table: the fields of a point, the extrapolation in one for each axis.
TABLE_COLUMNS = tuple(
    column
    for field in PredictedPoint.model_fields
    for column in ([f"{field}_{axis}" for axis in AXES] if field == "extrapolation" else [field])
)
#: What stands before each of them in the JSON of a point.
_JSON_KEYS = (
    *(f'{"," if number else "{"}"{column}":'.encode() for number, column in enumerate(TABLE_COLUMNS[:9])),
    *(b',"extrapolation":{"n_params":', b',"short_tokens":', b',"long_tokens":'),
    *(b'},"determined":', b',"warnings":'),
)


def json_chunks(head: Predictions, law: FittedLaw, at: Sizes) -> Iterator[bytes]:
    """The body `head`, which has no points, with the points in it."""
    yield head.model_dump_json().removesuffix("]}").encode()
    for number, (sizes, said) in enumerate(_blocks(law, at, head.level)):
        columns = [*_columns(sizes, said, _NULL), map(to_json, said.warnings)]
        pieces = [piece for key, column in zip(_JSON_KEYS, columns, strict=True) for piece in (repeat(key), column)]
        yield (b"," if number else b"") + b",".join(map(b"".join, zip(*pieces, repeat(b"}"), strict=False)))
    yield b"]}"


def csv_chunks(law: FittedLaw, at: Sizes, *, level: float) -> Iterator[bytes]:
    """A header line, then a line for each point; no number is an empty cell, several warnings are one text."""
    yield ",".join(TABLE_COLUMNS).encode() + b"\r\n"
    for sizes, said in _blocks(law, at, level):
        columns = [*_columns(sizes, said, b""), (_quoted(" | ".join(texts)) for texts in said.warnings)]
        yield b"\r\n".join(map(b",".join, zip(*columns, strict=True))) + b"\r\n"


def _blocks(law: FittedLaw, at: Sizes, level: float) -> Iterator[tuple[Sizes, PredictedColumns]]:
    for start in range(0, max(size.size for size in at), _BLOCK):
        n_params, short_tokens, long_tokens = (size if size.size == 1 else size[start : start + _BLOCK] for size in at)
        yield (
            (n_params, short_tokens, long_tokens),
            predict_columns(law, n_params, short_tokens, long_tokens, level=level),
        )


def _columns(sizes: Sizes, said: PredictedColumns, nothing: bytes) -> list[Iterable[bytes]]:
    """All but the warnings, as text."""
    longppl = np.array([math.exp(value) if value < _LARGEST else math.inf for value in said.value.tolist()])
    intervals = (said.low, said.high, said.prediction_low, said.prediction_high)
    numbers = (*sizes, said.value, longppl, *intervals, *said.extrapolation)
    determined = [b"true" if known else b"false" for known in said.determined.tolist()]
    return [*(_texts(column, len(determined), nothing) for column in numbers), determined]


def _texts(column: FloatArray, count: int, nothing: bytes) -> Iterable[bytes]:
    """Numbers in their shortest exact form; `nothing` where one is not finite, and so does not exist."""
    texts = to_json(column.tolist(), inf_nan_mode="null")[1:-1].split(b",")
    if nothing != _NULL and not np.isfinite(column).all():
        texts = [nothing if text == _NULL else text for text in texts]
    return texts if len(texts) == count else repeat(texts[0], count)


def _quoted(text: str) -> bytes:
    """A text of ours as a cell (RFC 4180); none begins like a formula."""
    return b'"' + text.replace('"', '""').encode() + b'"' if text else b""
