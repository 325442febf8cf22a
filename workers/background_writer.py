"""Checkpoints written beside training: one at a time, in order, by one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from workers.results import Checkpoint


class BackgroundWriter:
    """A context manager; on leaving it waits for the write under way, so that no half-written file is left.

    Training hands over a copy of its state and goes on. Where it comes back with the next one before the last is
    durable, it waits: no more than one copy is ever held.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._pending: Future[Checkpoint] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)

    @property
    def ready(self) -> bool:
        """Whether a checkpoint has become durable, or could not, and was not taken yet."""
        return self._pending is not None and self._pending.done()

    def submit(self, write: Callable[[], Checkpoint]) -> None:
        """Begins a write; what was submitted before must have been taken by `finished`.

        Raises:
            RuntimeError: if it was not.
        """
        if self._pending is not None:
            raise RuntimeError("the checkpoint before this one was not taken yet")
        self._pending = self._thread.submit(write)

    def finished(self, *, wait: bool = False) -> Iterator[Checkpoint]:
        """The checkpoint that has become durable, if any; `wait` for it. Whatever its writing raised is raised here."""
        if self._pending is not None and (wait or self._pending.done()):
            pending, self._pending = self._pending, None
            yield pending.result()
