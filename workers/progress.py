"""Signs of life of long measurements."""

from __future__ import annotations

from collections.abc import Callable

#: Called with what is going on, how much of it is done and how much there is.
Report = Callable[[str, int, int], None]


def unreported(stage: str, done: int, total: int) -> None:
    """Where nobody listens."""
