"""Specifications as the database keeps them: JSON objects, read back into the values of `workers.spec`."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Hashable, Set
from typing import Any, TypeVar

from workers.probe_spec import ProbeSet
from workers.spec import Evaluator, Execution, ObservationRule, Segment, canonical_json

Spec = Segment | Evaluator | ProbeSet | ObservationRule | Execution
S = TypeVar("S")


def to_json(spec: Spec) -> dict[str, Any]:
    """The JSON object of `spec`, the one that its identity hashes: what is left out has its default."""
    document: dict[str, Any] = json.loads(canonical_json(spec))
    return document


def segment_from_json(document: dict[str, Any]) -> Segment:
    """The segment that `to_json` wrote. JSONB keeps 10000.0 as 10000.0, so identities survive the round trip."""
    return _read(Segment, document)


def evaluator_from_json(document: dict[str, Any]) -> Evaluator | ProbeSet:
    """The evaluator, or the set of probes, that `to_json` wrote."""
    return _read(ProbeSet, document) if "probes" in document else _read(Evaluator, document)


def rule_from_json(document: dict[str, Any]) -> ObservationRule:
    """The observation rule that `to_json` wrote."""
    return _read(ObservationRule, document)


def execution_from_json(document: dict[str, Any]) -> Execution:
    """The execution that `to_json` wrote, or the default one of a row from before it was written."""
    return _read(Execution, document)


def _read(cls: type[S], document: dict[str, Any]) -> S:
    hints = _hints(typing.cast(Hashable, cls))
    return cls(**{name: _value(hints[name], value) for name, value in document.items()})


def _value(hint: Any, value: Any) -> Any:
    """`value` as the type `hint` has it: objects become dataclasses, arrays become tuples, the rest is as it was."""
    if isinstance(value, dict):
        return _read(_class_of(hint, value.keys()), value)
    if isinstance(value, list):
        of_items = next(args[0] for args in map(typing.get_args, _alternatives(hint)) if args)
        return tuple(_value(of_items, item) for item in value)
    return value


def _class_of(hint: Any, names: Set[str]) -> type:
    """The one dataclass among the alternatives of `hint` that has all of `names` and needs no others."""
    for cls in _alternatives(hint):
        if dataclasses.is_dataclass(cls):
            fields = dataclasses.fields(cls)
            needed = {field.name for field in fields if field.default is dataclasses.MISSING}
            if needed <= names <= {field.name for field in fields}:
                return typing.cast(type, cls)
    raise ValueError(f"no specification has the fields {', '.join(sorted(names))}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


@functools.cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cls)
