"""Field types of the grid document: numbers in any spelling, labels, budgets, and the strict model they live in."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator

from orchestrator.budgets import Budget, parse_budget, parse_integer, parse_real

MAX_LABEL_LENGTH = 200


class Settings(BaseModel):
    """Outside data: unknown keys are errors, and what was read never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def _label(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    if any(unicodedata.category(character) == "Cc" for character in text):
        raise ValueError("must not contain control characters")
    return text


def _written(budget: Budget) -> int | str:
    return str(budget) if budget.tokens is None else budget.tokens


Integer = Annotated[int, BeforeValidator(parse_integer)]
Count = Annotated[Integer, Field(ge=1)]
Natural = Annotated[Integer, Field(ge=0)]
Real = Annotated[float, BeforeValidator(parse_real)]
Positive = Annotated[Real, Field(gt=0)]
Share = Annotated[Real, Field(ge=0, le=1)]
Ratio = Annotated[Real, Field(gt=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
#: A name, kept exactly as written; it never becomes a path.
Label = Annotated[str, Field(max_length=MAX_LABEL_LENGTH), AfterValidator(_label)]
Place = Annotated[str, Field(max_length=4096), AfterValidator(_label)]
TokenBudget = Annotated[
    Budget, PlainValidator(parse_budget, json_schema_input_type=int | str), PlainSerializer(_written, return_type=Any)
]
