"""Reading a grid document's text, YAML or JSON, into plain values. Nothing is executed, expanded or guessed.

Numbers stay text here, to be read by the field that wants one (`orchestrator.budgets`): so `1e9` is a number where a
number is due, and a corpus hash made of digits stays a hash. Of YAML's implicit types only null, true and false are
kept; `no`, `010`, `12:30` and dates are the words they look like.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import yaml

from orchestrator.errors import GridError, Problem

DocumentFormat = Literal["yaml", "json"]

MAX_DOCUMENT_BYTES = 1024 * 1024
#: Reading YAML is a hundred times slower than reading JSON.
MAX_YAML_BYTES = 128 * 1024
#: Values a YAML document may hold once every alias is written out in full.
MAX_DOCUMENT_VALUES = 10_000
MAX_DOCUMENT_DEPTH = 32


class _Loader(yaml.SafeLoader):
    """Safe YAML that counts what aliases expand to while it reads, so that a bomb of aliases never goes off."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML reads this class attribute

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._depth = 0
        self._weights: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._weights:
                raise _refusal("an anchor may not contain itself", event)
            self._count(self._weights[id(node)], event)
            return node
        if tag := getattr(event, "tag", None):
            raise _refusal(f"tags such as {tag} are no part of the grid format", event)
        before = self._values
        self._count(1, event)
        self._depth += 1
        if self._depth > MAX_DOCUMENT_DEPTH:
            raise _refusal(f"values may be nested {MAX_DOCUMENT_DEPTH} deep at most", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._weights[id(node)] = self._values - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        written: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in written:
                    raise _refusal(f"the key {key.value!r} is given twice", key)
                written.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def _count(self, values: int, event: yaml.Event) -> None:
        self._values += values
        if self._values > MAX_DOCUMENT_VALUES:
            raise _refusal(f"the document holds more than {MAX_DOCUMENT_VALUES:,} values, aliases written out", event)


def _implicit(tag: str, pattern: str, first_characters: list[str]) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"), first_characters)


_implicit("bool", "true|True|TRUE|false|False|FALSE", list("tTfF"))
_implicit("null", "~|null|Null|NULL|", ["~", "n", "N", ""])
_implicit("merge", "<<", ["<"])


def read_document(text: str, *, format: DocumentFormat) -> Any:
    """The plain values (mappings, lists, text, true, false, null) that `text` holds; numbers as their text.

    Raises:
        GridError: if the text is too large, not valid, repeats a key, or expands beyond the limits.
    """
    limit = MAX_YAML_BYTES if format == "yaml" else MAX_DOCUMENT_BYTES
    if len(text.encode(errors="replace")) > limit:
        raise _error(f"the document is larger than {limit // 1024} KiB")
    return _read_yaml(text) if format == "yaml" else _read_json(text)


def _read_yaml(text: str) -> Any:
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise _error(f"{place}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise _error(f"not valid YAML: {str(error).splitlines()[0]}") from None


def _read_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(pairs)
        if len(document) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise _error(f"the key {twice!r} is given twice")
        return document

    def refuse(constant: str) -> Any:
        raise _error(f"{constant} is no number that a grid may hold")

    try:
        document = json.loads(text, object_pairs_hook=unique, parse_int=str, parse_float=str, parse_constant=refuse)
        json.dumps(document, ensure_ascii=False).encode()
        return document
    except json.JSONDecodeError as error:
        raise _error(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except UnicodeEncodeError:
        raise _error("a lone surrogate is no character; write the whole pair") from None
    except RecursionError:
        raise _error(f"values may be nested {MAX_DOCUMENT_DEPTH} deep at most") from None


def _refusal(message: str, place: Any) -> yaml.MarkedYAMLError:
    """An error at an event or a node, raised through PyYAML's own frames and reported with its line."""
    return yaml.constructor.ConstructorError(None, None, message, place.start_mark)


def _error(message: str) -> GridError:
    return GridError([Problem(pointer="", message=message)])
