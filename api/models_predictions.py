"""The body of `POST /v1/predictions`: up to a million points, read into arrays and checked as arrays."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    GetCoreSchemaHandler,
    Tag,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from api.models import Request

MAX_POINTS = 1_000_000
_MAX_PLACES = 51  # that are named of one list: one more than an answer shows, so that it can say that there are more

FloatArray = NDArray[np.float64]
Size = Annotated[FiniteFloat, Field(gt=0)]


class _Column:
    """Makes an array the value of what the schema describes as a list of sizes."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        listed = handler(Annotated[list[Size], Field(min_length=1, max_length=MAX_POINTS)])
        return core_schema.no_info_wrap_validator_function(_column, listed)


def _column(given: Any, one_by_one: ValidatorFunctionWrapHandler) -> FloatArray:
    """A list of sizes as float64, checked at once; where something is wrong pydantic says what, number by number."""
    if isinstance(given, list) and 0 < len(given) <= MAX_POINTS:
        if {*map(type, given)} <= {int, float}:
            with suppress(OverflowError):  # an integer beyond every float
                sizes = np.array(given, dtype=np.float64)
                if (np.isfinite(sizes) & (sizes > 0)).all():
                    return sizes
        wrong = (place for place, size in enumerate(given) if not _is_size(size))
        given = given[: max(islice(wrong, _MAX_PLACES), default=len(given)) + 1]
    return np.array(one_by_one(given), dtype=np.float64)


def _is_size(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


Sizes = Annotated[FloatArray, _Column()]
#: Names of alternatives, which pydantic puts into places though no body has such a key.
ALTERNATIVES = ("<number>", "<list>")
Axis = Annotated[
    Annotated[Size, Tag(ALTERNATIVES[0])] | Annotated[Sizes, Tag(ALTERNATIVES[1])],
    Discriminator(lambda value: ALTERNATIVES[isinstance(value, list)]),
]


class At(Request):
    """Where to predict. Lists have one length; a single number holds for all their points."""

    n_params: Axis
    short_tokens: Axis
    long_tokens: Axis

    @model_validator(mode="after")
    def _same_length(self) -> At:
        axes = (self.n_params, self.short_tokens, self.long_tokens)
        lengths = {axis.size for axis in axes if isinstance(axis, np.ndarray)}
        if len(lengths) > 1:
            raise ValueError(f"lists must have one length, not {', '.join(str(item) for item in sorted(lengths))}")
        return self

    def columns(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """N, D_s and D_l: each (m), or (1) where one number holds for all points."""
        return np.atleast_1d(self.n_params), np.atleast_1d(self.short_tokens), np.atleast_1d(self.long_tokens)


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain NUL")
    return text


#: Text that is looked up in the database, where no text holds NUL.
SoughtText = Annotated[str, AfterValidator(_without_nul)]


class PredictionRequest(Request):
    fit: str = Field(default="latest", description="Id of a fit, or `latest`: the newest successful one of the series.")
    series: SoughtText | None = Field(default=None, description="Needed with `latest` where several series exist.")
    holdout: SoughtText | None = Field(default=None, description="With `latest`: the fit that held this selection out.")
    at: At
    level: float = Field(default=0.9, gt=0, lt=1, description="Nominal coverage of the intervals.")

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"at": {"n_params": 1e8, "short_tokens": 9e9, "long_tokens": [1e9, 2e9, 5e9]}},
                {
                    "fit": "0b8f4c8e-5f0e-4b7e-9d64-0b6f0f3f7a11",
                    "at": {"n_params": 1e8, "short_tokens": 9e9, "long_tokens": 5e9},
                },
            ]
        }
    )
