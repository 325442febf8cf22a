"""The OpenAPI document, where it differs from what the framework derives: how errors look, and bodies that we read."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api.csv_export import MEDIA_TYPE as CSV
from api.errors import MEDIA_TYPE
from api.models_imports import ObservationImport
from api.models_predictions import PredictionRequest

#: Bodies that routes read themselves, so that the framework does not know them.
_READ: tuple[type[BaseModel], ...] = (PredictionRequest, ObservationImport)
_SCHEMAS = "#/components/schemas/"


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for verbs in document["paths"].values():
            for operation in verbs.values():
                error = operation["responses"]["default"]
                error["content"] = {MEDIA_TYPE: error["content"]["application/json"]}
        for model in _READ:
            request = model.model_json_schema(ref_template=_SCHEMAS + "{model}")
            document["components"]["schemas"] |= request.pop("$defs") | {model.__name__: request}
        app.openapi_schema = document
    return app.openapi_schema


def body_schema(model: type[BaseModel], *, table: bool = False) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself: JSON, and with `table` also CSV."""
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": _SCHEMAS + model.__name__}}}
    if table:
        content[CSV] = {"schema": {"type": "string"}}
    return {"requestBody": {"required": True, "content": content}}
