"""Grids are told what to do on the command line, and say what came of it."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from longlaw import Client
from longlaw.errors import ApiProblem
from longlaw.grid_commands import follow
from tests.api import seeding
from tests.longlaw.command_line import longlaw


class Terminal(io.StringIO):
    """Standard input of somebody who types this."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def grid_id(service: str, engine: Engine) -> str:
    """A grid that runs, beside a smaller one that shares half of its work."""
    with Session(engine) as session, session.begin():
        grid_id = str(seeding.submit_grid(session).grid_id)
        seeding.submit_grid(session, seeding.document(name="smaller", long_tokens=[512]))
        assert seeding.next_segment(session) is not None
    return grid_id


def test_cancel_says_what_it_stops_and_asks_on_a_terminal(
    service: str, grid_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    refused = longlaw("grid", "cancel", grid_id, url=service)
    assert refused.returncode == 1
    for line in (
        "To cancel grid 'small':",
        "  stopped       0 segments, 2 evaluations",
        "  goes on       6 segments, 2 evaluations: other grids ask for them",
        "  saved         1,024 tokens of training",
        "  stays         0 of 4 cells measured, and all checkpoints",
    ):
        assert line in refused.stdout.splitlines()
    with Client(service) as client:
        assert client.grid(grid_id).state == "RUNNING"
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    done = longlaw("grid", "cancel", grid_id, url=service)
    assert done.returncode == 0
    assert "Grid 'small' is cancelled.\n" in done.stdout
    again = longlaw("grid", "cancel", grid_id, url=service)  # nothing is left to ask
    assert (again.returncode, "is cancelled already, since 2" in again.stdout) == (0, True)


def test_nobody_is_asked_who_says_yes_or_is_no_terminal(
    service: str, grid_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert "is cancelled." in longlaw("grid", "cancel", grid_id, "--yes", url=service).stdout
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    (smaller,) = [grid["id"] for grid in _listed(service) if grid["id"] != grid_id]
    cancelled = json.loads(longlaw("grid", "cancel", smaller, "--json", url=service).stdout)
    assert (cancelled["state"], cancelled["obeyed"]["segments"], cancelled["obeyed"]["attempts"]) == ("CANCELLED", 6, 1)


def test_paused_and_cancelled_grids_are_shown_as_such(service: str, grid_id: str) -> None:
    paused = longlaw("grid", "pause", grid_id, url=service)
    assert paused.stdout.startswith("Grid 'small' is paused.\n  waits         0 segments, 2 evaluations\n")
    assert "RUNNING, paused  0 of 4 cells measured" in longlaw("grid", "status", grid_id, url=service).stdout
    assert f"{grid_id}  small    paused" in longlaw("grid", "list", url=service, COLUMNS="80").stdout
    resumed = longlaw("grid", "resume", grid_id, url=service)
    assert resumed.stdout.startswith("Grid 'small' goes on.\n")
    longlaw("grid", "cancel", grid_id, "--yes", url=service)
    watched = longlaw("grid", "watch", grid_id, url=service)
    assert watched.returncode == 1
    assert watched.stdout.startswith("CANCELLED 0% of ")
    assert "cancelled" in watched.stdout.splitlines()[3]  # beside the bar of a scale that nobody trains for it
    with Client(service) as client:
        assert client.wait(grid_id).state == "CANCELLED"


def test_watching_says_when_a_grid_is_paused_and_ends_when_it_is_cancelled(service: str, grid_id: str) -> None:
    told = Console(file=io.StringIO(), width=200)
    with Client(service) as client:
        acts = iter([client.pause, client.resume, client.cancel])

        def act() -> None:
            """What somebody else does between two looks."""
            next(acts)(grid_id)

        with Client(service, meanwhile=act) as watcher:
            assert follow(watcher, grid_id, told, every_s=0.01) == "CANCELLED"
    assert isinstance(told.file, io.StringIO)
    starts = [line.split(" 0%")[0] for line in told.file.getvalue().splitlines()[:4]]
    assert starts == ["RUNNING", "RUNNING, paused:", "RUNNING", "CANCELLED"]


def test_failed_grid_tries_again(service: str, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        grid_id = str(seeding.submit_grid(session).grid_id)
        while (segment := seeding.next_segment(session)) is not None:
            seeding.train(session, segment)
        while (evaluation := seeding.next_evaluation(session)) is not None:
            seeding.fail_evaluation(session, evaluation, "out of memory")
    again = longlaw("grid", "retry", grid_id, url=service)
    assert again.stdout == "Grid 'small' tries again.\n  opened again  0 segments, 4 evaluations\n"
    with Client(service) as client:
        repeated = client.retry_failed(grid_id)
        assert (repeated.obeyed.repeated, repeated.obeyed.evaluations) == (True, 4)
        with Session(engine) as session, session.begin():
            seeding.finish(session)
        assert client.wait(grid_id).state == "SUCCEEDED"
        with pytest.raises(ApiProblem, match="nothing of it has failed") as raised:
            client.retry_failed(grid_id)
    assert raised.value.type.endswith("verb-not-allowed")


def test_verb_that_the_state_does_not_allow_is_one_message(service: str, grid_id: str) -> None:
    outcome = longlaw("grid", "retry", grid_id, url=service)
    assert outcome.returncode == 1
    assert "what its state allows: cancel, pause" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def _listed(service: str) -> list[dict[str, str]]:
    listed: list[dict[str, str]] = json.loads(longlaw("grid", "list", "--json", url=service).stdout)
    return listed
