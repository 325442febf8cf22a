"""Errors of deciding what to train.

OrchestratorError
├── GridError             a grid that cannot be read or planned; lists every problem with its place in the document
└── RayUnreachableError   no Ray answers at the address that was given
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something to mend in a document, at `pointer` (an RFC 6901 JSON Pointer; "" is the whole document)."""

    pointer: str
    message: str

    def __str__(self) -> str:
        return f"{self.pointer}: {self.message}" if self.pointer else self.message


class OrchestratorError(Exception):
    """Base of everything that planning and scheduling raise on purpose."""


class GridError(OrchestratorError):
    """The grid is not usable. `problems` holds all that was found, in the order of the document where it is known."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class RayUnreachableError(OrchestratorError):
    """No Ray answers at the address that was given."""
