"""`python -m api` as a process: where it listens, what it refuses, what it leaves in its log."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from sqlalchemy import make_url

from api.main import ApiSettings, PublicBindError, check_bind


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_bind_that_others_reach_is_refused_until_it_is_meant(host: str) -> None:
    """Without access tokens whoever reaches the API may launch grids."""
    with pytest.raises(PublicBindError, match="LONGLAW_API_ALLOW_PUBLIC=1"):
        check_bind(ApiSettings(host=host))
    check_bind(ApiSettings(host=host, allow_public=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_no_permission(host: str) -> None:
    check_bind(ApiSettings(host=host))


def test_process_that_must_not_listen_says_why_and_exits(tmp_path: Path) -> None:
    outcome = _run(tmp_path, LONGLAW_API_HOST="0.0.0.0", LONGLAW_DATABASE_URL="postgresql://u:S3cr3tPw@127.0.0.1:9/d")
    assert outcome.returncode == 1
    assert "no access tokens" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert "S3cr3tPw" not in outcome.stderr


def test_process_without_database_says_so(tmp_path: Path) -> None:
    outcome = _run(tmp_path)
    assert outcome.returncode == 1
    assert "longlaw up" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_process_serves_and_ends_politely_on_sigterm(tmp_path: Path, database_url: str) -> None:
    """B115: neither requests nor the end leave the database's password in the log."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = tmp_path / "api.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "api"],
            env=_environment(tmp_path) | {"LONGLAW_DATABASE_URL": database_url, "LONGLAW_API_PORT": str(port)},
            stdout=file,
            stderr=file,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            _wait_until_it_answers(http, process)
            assert http.get("/readyz").status_code == 200
            assert http.get("/v1/grids/x").status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
    password = make_url(database_url).password
    assert password is not None
    assert password not in log.read_text()
    assert "GET /readyz" in log.read_text()


def _wait_until_it_answers(http: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    while True:
        assert process.poll() is None
        try:
            http.get("/healthz")
            return
        except httpx.TransportError:
            time.sleep(0.1)


def _environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LONGLAW_")}
    return kept | {"LONGLAW_HOME": str(home)}


def _run(home: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "api"]
    return subprocess.run(command, env=_environment(home) | settings, capture_output=True, text=True, timeout=120)
