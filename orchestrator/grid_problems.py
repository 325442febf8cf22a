"""What pydantic found, said as a person would: a JSON Pointer and what to do."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, Tag, ValidationError

from orchestrator.budgets import shown
from orchestrator.errors import Problem

#: Tags of alternatives that pydantic mentions in a location though the document has no such key.
ALTERNATIVES = ("<one>", "<list>", "<by scale>", "<shape>", "<model>")
_PROBES = ("<position_loss>", "<passkey>", "<needle_loss>", "<retrieval_heads>", "<ruler>")
_TAGS = (*ALTERNATIVES, *_PROBES)


def pointer(*parts: str | int) -> str:
    """The RFC 6901 JSON Pointer of a place."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """One problem for each of pydantic's errors about a document that should have been a `model`."""
    problems = []
    for found in error.errors(include_url=False):
        if found["type"] == "too_short" and found["input"]:
            continue  # the list has entries, each of them a problem of its own
        place = [part for part in found["loc"] if part not in _TAGS and part != "[key]"]
        message = _message(found["type"], found["msg"], found["input"], found.get("ctx", {}))
        if found["type"] == "extra_forbidden":
            message = f"unknown key{_suggestion(str(place[-1]), _keys_at(model, found['loc'][:-1]))}"
        problems.append(Problem(pointer=pointer(*place), message=message))
    return problems


def _message(kind: str, text: str, value: Any, context: dict[str, Any]) -> str:
    match kind:
        case "missing":
            return "is required"
        case "union_tag_invalid":
            return f"needs a kind: {', '.join(tag.strip('<>') for tag in _PROBES)}"
        case "value_error":
            return str(context["error"])
        case "greater_than":
            return f"must be above {context['gt']:g}, not {shown(value)}"
        case "greater_than_equal":
            return f"must be at least {context['ge']:g}, not {shown(value)}"
        case "less_than":
            return f"must be below {context['lt']:g}, not {shown(value)}"
        case "less_than_equal":
            return f"must be at most {context['le']:g}, not {shown(value)}"
        case "literal_error":
            return f"must be {context['expected']}, not {shown(value)}"
        case "tuple_type" | "list_type":
            return f"must be a list, not {shown(value)}"
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"must be a mapping, not {shown(value)}"
        case "string_type":
            return f"must be text, not {shown(value)}"
        case "string_pattern_mismatch":
            return f"must match the pattern {context['pattern']}, not {shown(value)}"
        case "invalid_key":
            return "keys must be text"
        case "string_unicode":
            return "must not contain lone surrogates"
        case "bool_type":
            return f"must be true or false, not {shown(value)}"
        case "string_too_long":
            return f"must be at most {context['max_length']} characters long, not {len(value)}"
        case "too_short":
            return "must not be empty"
        case _:
            return text


def _suggestion(key: str, keys: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; valid keys are {', '.join(keys)}"


def _keys_at(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """Keys of the model that lies at `place` within `model`; positions in lists and keys of mappings lead on to it."""
    annotation: Any = model
    for part in place:
        if part in _TAGS:
            annotation = _tagged(annotation, str(part)) or annotation
        elif part in model.model_fields:
            annotation = model.model_fields[str(part)].annotation
        model = model_within(annotation) or model
    return [field.alias or name for name, field in model.model_fields.items()]


def _tagged(annotation: Any, tag: str) -> Any:
    """The alternative within an annotation that carries `tag`."""
    parts = typing.get_args(annotation)
    if any(isinstance(part, Tag) and part.tag == tag for part in parts):
        return parts[0]
    return next(filter(None, (_tagged(part, tag) for part in parts)), None)


def model_within(annotation: Any) -> type[BaseModel] | None:
    """The first model that an annotation mentions, however deep."""
    return next(iter(models_within(annotation)), None)


def models_within(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every model that an annotation mentions, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_within(part)
