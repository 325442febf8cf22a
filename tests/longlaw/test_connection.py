"""Faults that pass are waited for and said; those that stay end with an error that tells how long was waited."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from longlaw import Client
from longlaw.connection import Connection
from longlaw.errors import ApiProblem, LonglawError, ServiceUnreachableError
from tests.api import seeding
from tests.longlaw.conftest import Finished
from tests.longlaw.unsteady_service import Fault, UnsteadyService

PASSING: list[Fault] = ["away", "gateway", "later", "lost", "cut"]
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longlaw.connection._PAUSES_S", (0.0,) * len(PASSING))


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "longlaw.connection"):
        yield caplog


@pytest.mark.parametrize(
    "call",
    [
        lambda client, grid_id: client.grid(grid_id),
        lambda client, _: list(client.observations()),
        lambda client, _: client.plan(seeding.document()),
        lambda client, _: client.predict(n_params=5e4, short_tokens=2000, long_tokens=[600, 900]),
        lambda client, _: client.predict_frame(n_params=5e4, short_tokens=2000, long_tokens=[600, 900]).to_csv(),
        lambda client, grid_id: list(client.watch(grid_id)),
        lambda client, grid_id: client.wait(grid_id),
    ],
    ids=["grid", "observations", "plan", "predict", "predict_frame", "watch", "wait"],
)
def test_passing_faults_do_not_show_in_what_is_answered(
    finished: Finished, told: pytest.LogCaptureFixture, call: Callable[[Client, str], object]
) -> None:
    with UnsteadyService(finished.url, PASSING) as way, Client(way.url, patience_s=60) as client:
        disturbed = call(client, finished.grid_id)
        assert not way.faults
        assert disturbed == call(client, finished.grid_id)
    assert [record.message.partition(":")[0].partition(",")[0] for record in told.records] == [
        "The database does not answer",
        "The service answers again",
    ]
    assert "Trying again for up to 60 s" in told.records[0].message


def test_lost_answers_make_no_second_grid(service: str) -> None:
    """B85: the client asks again with the same key."""
    with UnsteadyService(service, ["lost", "away", "lost", "cut"]) as way, Client(way.url) as client:
        created = client.submit(seeding.document())
        assert [grid.id for grid in client.grids()] == [created.id]
        assert way.seen.count("POST /v1/grids") == 5


def test_service_that_comes_up_meanwhile_is_found(finished: Finished, told: pytest.LogCaptureFixture) -> None:
    """Connections are refused until whoever looks after the service starts it, which the client lets them do."""
    with (
        UnsteadyService(finished.url, started=False) as way,
        Client(way.url, patience_s=60, meanwhile=way.start) as client,
    ):
        assert client.grid(finished.grid_id).state == "SUCCEEDED"
    assert "Connection refused" in told.records[0].message


def test_request_that_may_not_be_repeated_is_not(finished: Finished) -> None:
    with UnsteadyService(finished.url, ["away"]) as way:
        connection = Connection(way.url, timeout_s=60, patience_s=60, meanwhile=None)
        with pytest.raises(ApiProblem, match="does not answer"):
            connection.ask("POST", "/v1/grids", repeatable=False)
        connection.close()
        assert way.seen == ["POST /v1/grids"]


@pytest.mark.parametrize("fault", ["broken", "hours"])
def test_fault_that_will_not_pass_in_time_is_told_at_once(finished: Finished, fault: Fault) -> None:
    """503 without Retry-After, or with one beyond our patience."""
    with UnsteadyService(finished.url, [fault]) as way, Client(way.url) as client:
        with pytest.raises(ApiProblem) as raised:
            client.series()
        assert way.seen == ["GET /v1/series"]
        assert raised.value.waited_s == 0.0


def test_error_tells_how_long_was_waited(finished: Finished) -> None:
    with Client(NOWHERE, patience_s=0.05) as client, pytest.raises(ServiceUnreachableError) as raised:
        client.series()
    assert raised.value.waited_s >= 0.05
    assert re.search(r"did not pass within 0\.\d s", str(raised.value))
    faults: list[Fault] = ["away"] * 1000
    with UnsteadyService(finished.url, faults) as way, Client(way.url, patience_s=0.05) as client:
        with pytest.raises(ApiProblem, match=r"did not pass within 0\.\d s"):
            client.series()
        assert len(way.seen) > 1


def test_end_of_waiting_for_a_grid_holds_while_the_service_is_away(service: str) -> None:
    """`timeout_s` bounds it all, however patient a wait is otherwise."""
    with UnsteadyService(service) as way, Client(way.url) as client:
        created = client.submit(seeding.document())
        way.faults += ["away"] * 1000
        with pytest.raises(ApiProblem, match="did not pass"):
            client.wait(created.id, timeout_s=0.1, every_s=0.0)


def test_patience_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGLAW_PATIENCE_S", "0")
    with Client(NOWHERE) as client, pytest.raises(ServiceUnreachableError) as raised:
        client.series()
    assert raised.value.waited_s == 0.0
    monkeypatch.setenv("LONGLAW_PATIENCE_S", "long")
    with pytest.raises(LonglawError, match="LONGLAW_PATIENCE_S is 'long'"):
        Client(NOWHERE)


def test_command_that_waits_says_so_and_ends_with_ctrl_c() -> None:
    command = [sys.executable, "-m", "longlaw.cli", "grid", "watch", "--url", NOWHERE]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LONGLAW_PATIENCE_S": "3600"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    assert process.stderr is not None
    with process:
        said = [process.stderr.readline(), process.stderr.readline()]
        process.send_signal(signal.SIGINT)
        said.append(process.stderr.read())
    assert NOWHERE in said[0]
    assert said[1] == "Trying again for up to 3600 s.\n"
    assert "Traceback" not in said[2]
    assert process.returncode not in (0, -signal.SIGKILL)
