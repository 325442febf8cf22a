"""Bodies of imports: results of somebody else's trainer, row by row, and what became of them."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from api.models import Body, Count, Id, Request
from orchestrator.fields import Label

MAX_ROWS = 20_000
_INT64_MAX = 2**63 - 1
_EXACT = 2**53  # the largest number up to which every whole one is a float
_LARGEST_LOG = 700.0  # exp of anything larger is not a finite float64

Metric = Literal["log_longppl", "log_shortppl", "log_ppl"]


def _whole(value: Any) -> Any:
    """A count that is written with a point or an exponent (31e6), as long as that leaves no doubt about it."""
    if not isinstance(value, float) or not value.is_integer():
        return value
    if abs(value) > _EXACT:
        raise ValueError("must be written as an integer above 2^53, where a point or an exponent may hide a rounding")
    return int(value)


_Count = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=_INT64_MAX, json_schema_extra={"format": "int64"})]
_Seed = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=_INT64_MAX, json_schema_extra={"format": "int64"})]


class SeriesDescription(Request):
    """What an import says of its rows. The same description is the same series, another word in it another one."""

    name: Label = Field(description="What the series is called.", examples=["our trainer"])
    protocol: Label = Field(
        description="Schedule of the long stage: `constant`, `linear_decay`, or a word of your own for another one."
    )
    rule: Label = Field(default="raw", description="How checkpoints became the models measured.")
    metric: Metric = Field(default="log_longppl", description="What `log_longppl` of the rows holds.")
    evaluator: Label | None = Field(default=None, description="A name for how it was measured; the series' by default.")
    family: Label | None = Field(default=None, description="A name for the recipe; the series' by default.")


class ImportedObservation(Request):
    """A model that was measured elsewhere. N, D_s, D_l and both seeds tell rows of a series apart."""

    n_params: _Count = Field(description="N, non-embedding parameters.")
    short_tokens: _Count | None = Field(default=None, description="D_s; null where nobody knows it: no fit uses that.")
    long_tokens: _Count = Field(description="D_l.")
    log_longppl: FiniteFloat | None = Field(default=None, description="In nats per token; or give `longppl`.")
    longppl: FiniteFloat | None = Field(default=None, gt=0, description="exp(log_longppl), instead of it.")
    log_longppl_se: FiniteFloat | None = Field(default=None, ge=0, description="Standard error of log_longppl.")
    scale: Label | None = Field(default=None, description="A name for the model's size; `N=...` by default.")
    short_seed: _Seed = 0
    long_seed: _Seed = 0
    cluster: Label | None = Field(
        default=None,
        description="The short checkpoint: rows of one cluster share its noise. Scale, D_s and short seed by default.",
    )

    @model_validator(mode="after")
    def _one_value(self) -> ImportedObservation:
        if (self.log_longppl is None) == (self.longppl is None):
            raise ValueError("needs log_longppl or longppl, and not both")
        if abs(self.value) > _LARGEST_LOG:
            raise ValueError(f"log LongPPL is {self.value:g}; it must lie within {_LARGEST_LOG:g} of zero")
        return self

    @property
    def value(self) -> float:
        """log LongPPL, whichever was given."""
        if self.log_longppl is not None:
            return self.log_longppl
        assert self.longppl is not None
        return math.log(self.longppl)


class ObservationImport(Request):
    series: SeriesDescription
    observations: list[ImportedObservation] = Field(min_length=1, max_length=MAX_ROWS)

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "series": {"name": "our trainer", "protocol": "constant"},
                    "observations": [
                        {
                            "n_params": 31_000_000,
                            "short_tokens": 2_790_000_000,
                            "long_tokens": 310_000_000,
                            "log_longppl": 1.7549,
                        }
                    ],
                }
            ]
        }
    )


class ObservationsImported(Body):
    """What an import came to."""

    series_id: Id
    label: str
    inserted: Count = Field(description="Rows that are new.")
    found_again: Count = Field(description="Rows that were there already, with the same values.")
    points: Count = Field(description="Different (N, D_s, D_l) with a known D_s of the whole series.")
    fit_follows: bool = Field(description="Whether the scheduler fits the law anew because of these rows.")
    note: str | None = Field(description="Why no fit follows.")
