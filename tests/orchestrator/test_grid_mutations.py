"""One value of a grid changed at a time: it plans, or every problem has a place in the document and says what to do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import GridError, Problem
from orchestrator.grid import Grid, parse_grid
from orchestrator.plan import plan
from tests.orchestrator.grid_with_everything import document_with_everything

DOCUMENTS = [document_with_everything(constant=constant) for constant in (True, False)]

#: Values that some field somewhere takes, and values that none does.
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 16, 10**9, 2**63 - 1, 2**63, 10**30),
    *(0.5, 1.5, -0.5, 1e300, 1e-300, float("nan"), float("inf")),
    *("nan", "1e3", "1e400", "1_000", "2N", "0N", "0.0000001N", "1e300N", "NN", "N"),
    *("", "x", "a", "m", "\0", "\ud800", "é" * 300, "unknown", "inherit", "largest", "raw", "scale=m"),
    *([], {}, [None], [1], [1, 1], ["a"], [[]], [{}]),
    *({"x": 1}, {"name": "raw"}, [{"name": "raw"}], {"a": [160]}, {"default": [160]}, {"kind": "copy"}, {"": 1}),
]

Place = tuple[str | int, ...]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*place, key))


def at(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


def is_in(document: Any, pointer: str) -> bool:
    """The pointer names a value, or a key that an existing mapping lacks; two where a stage is left out as a whole."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    for number, part in enumerate(parts):
        try:
            document = at(document, (int(part) if isinstance(document, list) else part,))
        except (KeyError, IndexError, ValueError, TypeError):
            left_out = isinstance(document, dict) and parts[number:][:1] == ["short"]
            return isinstance(document, (dict, list)) and len(parts) - number <= 1 + left_out
    return True


@st.composite
def changed(draw: st.DrawFn) -> Any:
    document = copy.deepcopy(draw(st.sampled_from(DOCUMENTS)))
    place = draw(st.sampled_from(list(places(document))[1:]))
    parent, key = at(document, place[:-1]), place[-1]
    match draw(st.sampled_from(["set", "set", "set", "remove", "repeat", "unknown key"])):
        case "set":
            parent[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        case "remove":
            del parent[key]
        case "repeat" if isinstance(parent, list):
            parent.append(copy.deepcopy(at(parent, (key,))))
        case "unknown key" if isinstance(parent, dict):
            parent["no such/key~"] = 1
    return document


def problems_of(document: Any) -> tuple[Problem, ...]:
    """What is told of a document; of one that plans, that it reads back as it is written out."""
    try:
        grid = parse_grid(document)
        planned = plan(grid)
    except GridError as error:
        return tuple(error.problems)
    assert Grid.model_validate(grid.model_dump()) == grid
    assert plan(Grid.model_validate_json(grid.model_dump_json())).cells == planned.cells
    return ()


@settings(max_examples=120, deadline=None)
@given(document=changed())
def test_one_changed_value_plans_or_is_told_in_its_place(document: Any) -> None:
    for problem in problems_of(document):
        assert is_in(document, problem.pointer), problem
        assert problem.message
        assert "hould be" not in problem.message


@pytest.mark.parametrize("document", DOCUMENTS, ids=["constant", "linear_decay"])
def test_an_unknown_key_is_refused_at_every_level(document: dict[str, Any]) -> None:
    free = {(), ("scales",), ("short_tokens",), ("long_tokens",)}  # keys there are names of scales
    for place in places(document):
        if place not in free and isinstance(at(document, place), dict):
            changed_document = copy.deepcopy(document)
            at(changed_document, place)["no_such_key"] = 1
            with pytest.raises(GridError) as caught:
                parse_grid(changed_document)
            pointers = {problem.pointer: problem.message for problem in caught.value.problems}
            assert "unknown key" in pointers["/" + "/".join(map(str, (*place, "no_such_key")))]


def test_what_no_list_can_be_is_refused_everywhere_a_list_is_read() -> None:
    for value in (True, 5, 0.5, "5", {"a": 1}):
        for key in ("rules", "cells", "follow_ups", "product_scales"):
            with pytest.raises(GridError) as caught:
                parse_grid(DOCUMENTS[0] | {key: value})
            assert ("/" + key, "must be a list") in {(p.pointer, p.message[:14]) for p in caught.value.problems}
