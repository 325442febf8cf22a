"""The command line as a person meets it: a process with arguments, an exit code and text."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from api.models import Failure
from longlaw.client import Client
from longlaw.grid_commands import _in_lines, follow
from tests.api import seeding
from tests.longlaw.command_line import longlaw
from tests.longlaw.conftest import Finished

COMMANDS = ["demo", "up", "grid", "predict", "fit", "merge", "data", "model", "db"]
GRID_COMMANDS = ["plan", "submit", "status", "watch", "list", "cancel", "pause", "resume", "retry"]


def test_help_lists_every_command_and_imports_none() -> None:
    program = (
        "import sys; sys.argv = ['longlaw', '--help']\n"
        "from longlaw.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'ray', 'fastapi', 'numpy', 'sqlalchemy', 'httpx', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for command in COMMANDS:
        assert f" {command} " in outcome.stdout


@pytest.mark.parametrize("arguments", [["grid"], ["predict"], *(["grid", name] for name in GRID_COMMANDS)])
def test_every_command_explains_itself(arguments: list[str]) -> None:
    outcome = longlaw(*arguments, "--help")
    assert outcome.returncode == 0
    assert "Usage: longlaw " + " ".join(arguments) in outcome.stdout
    assert "Traceback" not in outcome.stdout + outcome.stderr


def test_mistyped_command_gets_a_suggestion() -> None:
    outcome = longlaw("gird")
    assert outcome.returncode == 2
    assert "grid" in outcome.stderr


def test_missing_extra_is_said_and_how_to_get_it() -> None:
    program = (
        "import sys; sys.modules.update({'torch': None, 'tokenizers': None, 'transformers': None, 'fastapi': None})\n"
        "sys.argv = ['longlaw', 'data', 'list']\n"
        "from longlaw.cli import main\n"
        "main()\n"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if outcome.returncode:  # listing may do without
        assert "pip install 'longlaw[worker]'" in outcome.stderr
        assert "Traceback" not in outcome.stderr


def test_grid_is_submitted_listed_and_followed(service: str, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump(seeding.document(name="from a file")))
    first = longlaw("grid", "submit", str(file), "--json", "--idempotency-key", "k", url=service)
    second = longlaw("grid", "submit", str(file), "--json", "--idempotency-key", "k", url=service)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    grid_id = json.loads(first.stdout)["id"]
    listed = json.loads(longlaw("grid", "list", "--json", url=service).stdout)
    assert [grid["id"] for grid in listed] == [grid_id]
    table = longlaw("grid", "list", url=service, COLUMNS="80").stdout
    assert grid_id in table
    assert "PENDING" in table
    status = longlaw("grid", "status", url=service).stdout  # the newest one
    assert "from a file" in status
    assert "PENDING" in status
    assert "no scheduler is running" in status


def test_finished_grid_is_shown_and_watching_it_ends_at_once(finished: Finished) -> None:
    status = json.loads(longlaw("grid", "status", finished.grid_id, "--json", url=finished.url).stdout)
    assert status["cells"]["MEASURED"] == 8
    watched = longlaw("grid", "watch", url=finished.url)
    assert watched.returncode == 0
    assert watched.stdout.startswith("SUCCEEDED 100% of ")


def test_a_failed_follow_up_is_told_although_all_cells_were_measured(finished: Finished) -> None:
    with Client(finished.url) as client:
        grid = client.grid(finished.grid_id)
    failure = Failure(scale="d32", kind="SEGMENT", reason="CorpusError: set its copied_spans to 0", count=2)
    lines = Console(file=io.StringIO(), width=120)
    with _in_lines(lines) as update:
        update(grid.model_copy(update={"failures": (failure,)}))
    assert isinstance(lines.file, io.StringIO)
    assert "set its copied_spans to 0" in lines.file.getvalue()


def test_live_view_shows_a_bar_per_scale_and_ends_with_the_grid(finished: Finished) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Client(finished.url) as client:
        assert follow(client, finished.grid_id, screen) == "SUCCEEDED"
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    for text in ("small", "8 of 8 cells measured", "d32", "d64", "4/4 evaluated", "━━━", "done"):
        assert text in shown


def test_grid_may_come_from_standard_input(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = yaml.safe_dump(seeding.document(name="piped"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert "'piped' is submitted" in longlaw("grid", "submit", "-", url=service).stdout


@pytest.mark.parametrize("command", [["up"], ["demo", "grids/tiny.yaml"]])
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("LONGLAW_HOME", "{file}/home", "Not a directory"),
        ("LONGLAW_DATABASE_URL", "mysql://a:hunter2@b/c", "not in 'mysql'"),
    ],
)
def test_wrong_setting_is_one_line_without_its_value(
    command: list[str], variable: str, value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.delenv("LONGLAW_DATABASE_URL", raising=False)
    (tmp_path / "file").touch()
    outcome = longlaw(*command, **{variable: value.format(file=tmp_path / "file")})
    assert outcome.returncode == 1
    assert message in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
    assert "hunter2" not in outcome.stderr


@pytest.mark.parametrize(("module", "extra"), [("fastapi", "api"), ("ray", "worker"), ("torch", "worker")])
def test_service_without_its_extras_is_not_started(
    module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LONGLAW_DATABASE_URL", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    outcome = longlaw("up", LONGLAW_HOME=str(tmp_path))
    assert outcome.stderr == f"error: this needs {module}, which is not installed: pip install 'longlaw[{extra}]'\n"
    assert not list(tmp_path.iterdir())


def test_taken_port_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGLAW_DATABASE_URL", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outcome = longlaw("up", LONGLAW_HOME=str(tmp_path), LONGLAW_API_PORT=port)
    assert outcome.returncode == 1
    assert f"Port {port} is taken" in outcome.stderr
    assert not (tmp_path / "postgres").exists()


def test_corpus_is_looked_up_in_the_store(service: str, tmp_path: Path) -> None:
    grid = seeding.document()
    grid["recipe"] = {**grid["recipe"], "corpus": "my-corpus"}
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump(grid))
    missing = longlaw("grid", "submit", str(file), url=service, LONGLAW_STORE=str(tmp_path))
    assert missing.returncode == 1
    assert 'no corpus "my-corpus"' in missing.stderr
    assert "longlaw data build" in missing.stderr
    names = tmp_path / "corpora" / "names"
    names.mkdir(parents=True)
    (names / "my-corpus").write_text(seeding.CORPUS)
    found = longlaw("grid", "submit", str(file), url=service, LONGLAW_STORE=str(tmp_path))
    assert found.returncode == 0, found.stderr


def test_prediction_is_a_table_or_json(finished: Finished) -> None:
    at = ["--n", "5e4", "--short", "2_000", "--long", "600", "--long", "900"]
    table = longlaw("predict", *at, url=finished.url)
    assert "log LongPPL" in table.stdout
    assert finished.fit_id in table.stdout
    assert "note: " in table.stdout
    answer = json.loads(longlaw("predict", *at, "--fit", finished.fit_id, "--json", url=finished.url).stdout)
    assert [point["long_tokens"] for point in answer["predictions"]] == [600, 900]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grid", "status"], "There is no grid yet"),
        (["grid", "status", "x"], "'x' is no id"),
        (["predict", "--n", "1", "--short", "1", "--long", "1"], "need at least 7 distinct observations, have 0"),
        (["grid", "submit", "nothing.yaml"], "nothing.yaml"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_exit_code_1(service: str, arguments: list[str], message: str) -> None:
    """B63 among others."""
    outcome = longlaw(*arguments, url=service)
    assert outcome.returncode == 1
    assert outcome.stderr.startswith("error: ")
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_service_that_does_not_run_is_named_by_the_installed_command() -> None:
    command = [str(Path(sys.executable).with_name("longlaw")), "grid", "list", "--url", "http://127.0.0.1:9"]
    impatient = {**os.environ, "LONGLAW_PATIENCE_S": "0"}
    outcome = subprocess.run(command, capture_output=True, text=True, env=impatient)
    assert outcome.returncode == 1
    assert "http://127.0.0.1:9" in outcome.stderr
    assert "longlaw up" in outcome.stderr
