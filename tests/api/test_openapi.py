"""The contract that machines read, and the page that people do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest


@pytest.fixture
def contract(reader: httpx.Client) -> dict[str, Any]:
    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    answer = reader.get("/openapi.json")
    assert answer.status_code == 200
    document: dict[str, Any] = json.loads(answer.text, parse_constant=refuse)
    return document


def test_every_example_fits_its_own_schema(contract: dict[str, Any]) -> None:
    """B105."""
    found = 0
    for schema in _schemas(contract):
        for example in schema.get("examples", ()):
            jsonschema.validate(example, {**schema, "components": contract["components"]})
            found += 1
    assert found > 5


def test_every_reference_leads_somewhere(contract: dict[str, Any]) -> None:
    for schema in _schemas(contract):
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/components/schemas/")
            assert name in contract["components"]["schemas"]


def test_every_operation_answers_errors_as_problems(contract: dict[str, Any]) -> None:
    for path, verbs in contract["paths"].items():
        for verb, operation in verbs.items():
            assert list(operation["responses"]["default"]["content"]) == ["application/problem+json"], (verb, path)
            assert operation["description"]


def test_counts_are_declared_as_int64(contract: dict[str, Any]) -> None:
    """B109."""
    observation = contract["components"]["schemas"]["Observation"]["properties"]
    for count in ("n_params", "long_tokens"):
        assert observation[count]["format"] == "int64"
    assert "int64" in {kind.get("format") for kind in observation["short_tokens"]["anyOf"]}  # or null
    assert observation["id"]["type"] == "string"


def test_answers_fit_their_schemas(reader: httpx.Client, contract: dict[str, Any]) -> None:
    for path in ("/healthz", "/readyz", "/v1/grids", "/v1/observations", "/v1/series", "/v1/fits"):
        schema = contract["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(reader.get(path).json(), {**schema, "components": contract["components"]})


def test_page_of_endpoints_needs_nothing_from_elsewhere(reader: httpx.Client, contract: dict[str, Any]) -> None:
    """B105."""
    page = reader.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for path in contract["paths"]:
        assert path in page.text
    assert "<script" not in page.text
    assert "https://" not in page.text


def _schemas(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if any(key in node for key in ("type", "$ref", "anyOf", "properties")):
            yield node
        for value in node.values():
            yield from _schemas(value)
    elif isinstance(node, list):
        for value in node:
            yield from _schemas(value)
