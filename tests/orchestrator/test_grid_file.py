import json
import resource

import pytest

from orchestrator.errors import GridError
from orchestrator.grid_file import MAX_DOCUMENT_BYTES, MAX_YAML_BYTES, DocumentFormat, read_document


def refused(text: str, format: DocumentFormat = "yaml") -> str:
    with pytest.raises(GridError) as caught:
        read_document(text, format=format)
    (problem,) = caught.value.problems
    assert problem.pointer == ""
    return problem.message


def alias_bomb(levels: int = 9, aliases: int = 9) -> str:
    lines = [f"a: &a [{','.join('x' * aliases)}]"]
    for name, inner in zip("bcdefghi"[: levels - 1], "abcdefghi", strict=False):
        lines.append(f"{name}: &{name} [{','.join([f'*{inner}'] * aliases)}]")
    return "\n".join(lines)


def test_a_bomb_of_aliases_does_not_go_off() -> None:
    """B110: 9^9 leaves in some 300 bytes; memory must not grow by 50 MB."""
    bomb = alias_bomb()
    assert len(bomb) < 400
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "aliases written out" in refused(bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_a_few_anchors_are_welcome() -> None:
    """B110."""
    text = "a: &a {x: 1}\nb: &b [1, 2]\nc: &c word\nd: [*a, *b, *c]\ne: {<<: *a, y: 2}"
    document = read_document(text, format="yaml")
    assert document["d"] == [{"x": "1"}, ["1", "2"], "word"]
    assert document["e"] == {"x": "1", "y": "2"}


def test_numbers_and_words_stay_as_they_are_written() -> None:
    """B106: what YAML 1.1 would make of 010, no, 12:30, 2024-01-01, 1e9 and a hash like 1e10."""
    text = "[1e9, 010, no, on, 12:30, 2024-01-01, 0x10, 1_000, ~, null, true, False, 'null']"
    words = ["1e9", "010", "no", "on", "12:30", "2024-01-01", "0x10", "1_000"]
    assert read_document(text, format="yaml") == [*words, None, None, True, False, "null"]


def test_json_numbers_keep_every_digit() -> None:
    """B109."""
    text = '{"a": 9007199254740993, "b": 1e9, "c": true, "d": 9007199254740993.0}'
    assert read_document(text, format="json") == {
        "a": "9007199254740993",
        "b": "1e9",
        "c": True,
        "d": "9007199254740993.0",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/object/apply:os.system [ls]", "tags"),
        ("a: !!int 3", "tags"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' is given twice"),
        ("a: &a [*a]", "an anchor may not contain itself"),
        ("a: *b", "undefined alias"),
        ("a: [1\nb: 2", "line 2"),
        ("a: 1\n--- \nb: 2", "another document"),
        ("[" * 100 + "]" * 100, "nested 32 deep"),
        ("a: \x00", "not valid YAML"),
        ("? [a]\n: 1", "unhashable key"),
        ("x" * (MAX_YAML_BYTES + 1), "larger than 128 KiB"),
        ("[" + "1," * 10_001 + "]", "more than 10,000 values"),
    ],
)
def test_bad_yaml_is_refused_in_words(text: str, message: str) -> None:
    assert message in refused(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": -Infinity}', "-Infinity is no number"),
        ('{"a"', "line 1, column 5"),
        (r'{"\ud800": 1}', "a lone surrogate"),
        ("[" * 100_000, "nested 32 deep"),
        (json.dumps("x" * MAX_DOCUMENT_BYTES), "larger than 1024 KiB"),
    ],
)
def test_bad_json_is_refused_in_words(text: str, message: str) -> None:
    assert message in refused(text, "json")
