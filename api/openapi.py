"""The OpenAPI document, where it differs from what the framework derives: how errors look, and bodies that we read."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.errors import MEDIA_TYPE
from api.models_predictions import PredictionRequest

_SCHEMAS = "#/components/schemas/"


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for verbs in document["paths"].values():
            for operation in verbs.values():
                error = operation["responses"]["default"]
                error["content"] = {MEDIA_TYPE: error["content"]["application/json"]}
        request = PredictionRequest.model_json_schema(ref_template=_SCHEMAS + "{model}")
        document["components"]["schemas"] |= request.pop("$defs") | {PredictionRequest.__name__: request}
        app.openapi_schema = document
    return app.openapi_schema


def body_schema(model: type[PredictionRequest]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its JSON body itself."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _SCHEMAS + model.__name__}}},
        }
    }
