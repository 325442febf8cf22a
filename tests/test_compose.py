"""`docker-compose.yml`: valid, and its commands work as plain processes with the environment it gives them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy.engine import make_url

from longlaw.client import Client
from tests.orchestrator.tiny_grid import tiny_corpus, tiny_document

ROOT = Path(__file__).parents[1]
SECRETS = {"LONGLAW_DB_PASSWORD": "not-the-default", "LONGLAW_RAY_TOKEN": "0123456789abcdef" * 4}


def _services(text: str) -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def _interpolated(value: str, environment: Mapping[str, str]) -> str:
    """What Compose makes of a value: ${NAME:?message}, ${NAME:-default}, and $$ for a dollar."""

    def replace(match: re.Match[str]) -> str:
        name, operator, operand = match["name"], match["operator"], match["operand"]
        if name in environment:
            return environment[name]
        assert operator == ":-", f"{name} is required: {operand}"
        return str(operand)

    parts = value.split("$$")
    return "$".join(re.sub(r"\$\{(?P<name>\w+)(?:(?P<operator>:[-?])(?P<operand>[^}]*))?\}", replace, p) for p in parts)


def test_compose_file_follows_the_schema() -> None:
    validator = Path(sys.executable).with_name("check-jsonschema")
    outcome = subprocess.run(
        [validator, "--builtin-schema", "vendor.compose-spec", ROOT / "docker-compose.yml"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_every_service_is_watched_and_no_secret_is_written_down() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    services = _services(text)
    assert set(services) == {"postgres", "migrate", "api", "scheduler", "worker"}
    assert all("healthcheck" in service for name, service in services.items() if name != "migrate")
    for name in ("LONGLAW_DB_PASSWORD", "LONGLAW_RAY_TOKEN"):
        assert re.findall(rf"\$\{{{name}(..)", text)
        assert set(re.findall(rf"\$\{{{name}(..)", text)) == {":?"}, "a secret must have no default"
    assert services["scheduler"]["environment"]["RAY_AUTH_MODE"] == "token"
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_api_image_installs_no_torch() -> None:
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    api = next(stage for stage in stages if " AS api" in stage.splitlines()[0])
    assert "'.[api]'" in api
    assert "worker" not in api


@pytest.mark.timeout(280)
def test_commands_train_a_grid_as_plain_processes(database_url: str, reachable_tmp_path: Path) -> None:
    services = _services((ROOT / "docker-compose.yml").read_text())
    ray_port, api_port = _free_port(), _free_port()
    here = {
        "LONGLAW_DATABASE_URL": make_url(database_url).render_as_string(hide_password=False),
        "LONGLAW_HOME": str(reachable_tmp_path),
        "LONGLAW_STORE": str(reachable_tmp_path / "store"),
        "LONGLAW_API_HOST": "127.0.0.1",
        "LONGLAW_API_PORT": str(api_port),
        "LONGLAW_RAY_PORT": str(ray_port),
        "LONGLAW_RAY_ADDRESS": f"127.0.0.1:{ray_port}",
        "LONGLAW_RAY_HEAD": f"127.0.0.1:{ray_port}",
        "LONGLAW_WORKER_GPUS": "0",  # none here
        "RAY_TMPDIR": f"/tmp/longlaw-ray-{os.getpid()}",  # short: it holds sockets
    }
    document = tiny_document(
        tiny_corpus(reachable_tmp_path / "store"), widths=(16,), short_steps=(27,), long_steps=(8,)
    )

    def environment(name: str) -> dict[str, str]:
        given = {key: _interpolated(value, SECRETS) for key, value in services[name]["environment"].items()}
        assert set(given) <= {*here, "LONGLAW_API_ALLOW_PUBLIC", "LONGLAW_WORKERS", *os.environ} | {
            key for key in given if key.startswith("RAY_")
        }
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, **given, **here}

    def command(name: str) -> list[str]:
        return [_interpolated(part, SECRETS) for part in services[name]["command"]]

    migrate = subprocess.run(
        command("migrate"), env=environment("migrate"), capture_output=True, text=True, check=False, timeout=120
    )
    assert migrate.returncode == 0, migrate.stderr
    with contextlib.ExitStack() as running:
        for name in ("api", "scheduler", "worker"):
            running.enter_context(_running(command(name), environment(name), log=reachable_tmp_path / f"{name}.log"))
        with Client(f"http://127.0.0.1:{api_port}") as client:
            _wait_until_ready(client.base_url)
            grid = client.wait(client.submit(document).id, timeout_s=240)
            assert grid.state == "SUCCEEDED", [failure.reason for failure in grid.failures]
        health = subprocess.run(
            services["scheduler"]["healthcheck"]["test"][1:], env=environment("scheduler"), check=False, timeout=60
        )
        assert health.returncode == 0


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], *, log: Path) -> Iterator[None]:
    """A process group of its own, ended as a whole: as the container would be."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(url: str) -> None:
    deadline_s = time.monotonic() + 60
    with httpx.Client(base_url=url) as http:
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.TransportError):
                if http.get("/readyz").status_code == 200:
                    return
            time.sleep(0.2)
    pytest.fail("the API did not become ready")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
