"""One real Ray with two workers for all tests of this folder that ask for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.executor import RayExecutor
from tests.orchestrator.tiny_grid import tiny_corpus


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that the workers of this session use."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def corpus(store: Path) -> str:
    """The hash of a tiny corpus in `store`."""
    return tiny_corpus(store)


@pytest.fixture(scope="session")
def ray_workers(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayExecutor]:
    """Two workers on a private Ray, at the niceness of the tests themselves."""
    state_dir = tmp_path_factory.mktemp("ray")
    with RayExecutor(workers=2, store=store, state_dir=state_dir, niceness=0, stop_grace_s=2.0) as executor:
        yield executor


@pytest.fixture
def idle_workers(ray_workers: RayExecutor) -> RayExecutor:
    """The same workers, when all of them are ready and have nothing to do."""
    deadline_s = time.monotonic() + 240.0
    while len(ray_workers.free()) < len(ray_workers):
        for item in ray_workers.poll(timeout_s=0.1):
            ray_workers.settle(item)
        for token in ray_workers.attempts():
            ray_workers.stop(token)
        assert time.monotonic() < deadline_s, "the workers did not become ready"
    return ray_workers
