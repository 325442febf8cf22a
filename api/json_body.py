"""Bodies that are read here and not by the framework: their size is bounded before they are parsed."""

from __future__ import annotations

from typing import TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from api.errors import MalformedBodyError

B = TypeVar("B", bound=BaseModel)


def read_json(model: type[B], body: bytes) -> B:
    """The body as a `model`.

    Raises:
        MalformedBodyError: it is no JSON.
        RequestValidationError: it holds values that are not allowed; each is named.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        if found[0]["type"] == "json_invalid":
            raise MalformedBodyError(f"The body is not JSON: {found[0]['ctx']['error']}.") from None
        raise RequestValidationError([{**item, "loc": ("body", *item["loc"])} for item in found]) from None
