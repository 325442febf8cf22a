"""Cells of CSV tables, as imports read and exports write them: whole numbers exactly, text that no spreadsheet runs.

The client reads tables of its own with this too, and needs no web framework for it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence

#: What a spreadsheet would run, also behind apostrophes: else one of ours could not be told from one of the text's own.
_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_SHOWN = 40  # characters
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def records(text: str) -> Iterator[tuple[int, list[str]]]:
    """The records that are not blank, each with its first line, from 1.

    Raises:
        csv.Error: the text is no CSV; the message names the line.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        for cells in reader:
            if any(cells):
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise csv.Error(f"Line {line} is not CSV: {error}") from None


def number(cell: str) -> int | float | str:
    """The number that a cell holds, exactly where it is whole; whatever is none stays text, and is refused as such."""
    if _INTEGER.fullmatch(cell):
        return int(cell)
    return float(cell) if _NUMBER.fullmatch(cell) else cell


def inert_text(text: str) -> str:
    """The text as it leaves: with an apostrophe before what a spreadsheet would run."""
    return "'" + text if _FORMULA.match(text) else text


def plain_text(cell: str) -> str:
    """The text that left as `cell`."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def wrong_number_of_cells(cells: Sequence[str], header: Sequence[object]) -> str:
    return f"has {len(cells)} cells where the header has {len(header)}"


def separator_hint(header: Sequence[str]) -> str:
    """What is wrong with a header that is all in one cell; empty for any other."""
    found = next((mark for mark in ";\t|" if len(header) == 1 and mark in header[0]), None)
    return "" if found is None else f" (cells are separated by commas, not by {found!r})"


def shown(value: object) -> str:
    """A cell's value in a message, of which a long one is cut."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
