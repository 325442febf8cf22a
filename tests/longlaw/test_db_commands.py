"""`longlaw db`, typed against a real server."""

from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from typer.testing import CliRunner

from database.embedded import embedded_postgres, running_url
from database.engine import create_engine
from database.migrate import head_revision
from longlaw.db_commands import db_app
from tests.conftest import MakeDatabase

runner = CliRunner()


@pytest.fixture
def home(reachable_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A LONGLAW_HOME of this test alone, with no other database configured."""
    monkeypatch.delenv("LONGLAW_DATABASE_URL", raising=False)
    monkeypatch.setenv("LONGLAW_HOME", str(reachable_tmp_path))
    return reachable_tmp_path


@pytest.fixture
def password(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The password of a database that LONGLAW_DATABASE_URL names."""
    monkeypatch.setenv("LONGLAW_DATABASE_URL", database_url)
    return str(make_url(database_url).password)


def test_url_hides_the_password_unless_asked(database_url: str, password: str) -> None:
    """B115."""
    hidden = runner.invoke(db_app, ["url"])
    assert hidden.exit_code == 0
    assert password not in hidden.output
    assert hidden.output.startswith("postgresql://longlaw:***@")
    shown = runner.invoke(db_app, ["url", "--show-password"])
    assert make_url(shown.output.strip()) == make_url(database_url).set(drivername="postgresql")


def test_url_of_a_stopped_embedded_server_says_how_to_start_it(home: Path) -> None:
    outcome = runner.invoke(db_app, ["url"])
    assert outcome.exit_code == 1
    assert "not running" in outcome.output
    assert "longlaw up" in outcome.output
    assert list(home.iterdir()) == []


def test_psql_without_a_database_makes_none(home: Path) -> None:
    outcome = runner.invoke(db_app, ["psql", "-c", "SELECT 1"])
    assert outcome.exit_code == 1
    assert "longlaw db upgrade" in outcome.output
    assert list(home.iterdir()) == []


def test_upgrade_and_psql_start_the_embedded_server_for_themselves(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    upgraded = runner.invoke(db_app, ["upgrade"])
    assert upgraded.exit_code == 0, upgraded.output
    assert upgraded.output == f"{head_revision()} (head)\n"
    assert running_url(home / "postgres") is None

    query = "SELECT version_num, current_user FROM alembic_version"
    asked = runner.invoke(db_app, ["psql", "--no-align", "--tuples-only", "-c", query])
    assert asked.exit_code == 0
    assert capfd.readouterr().out == f"{head_revision()}|longlaw\n"
    assert running_url(home / "postgres") is None

    with embedded_postgres(home / "postgres") as url:
        found = runner.invoke(db_app, ["url", "--show-password"])
        assert make_url(found.output.strip()) == make_url(url).set(drivername="postgresql")
        assert runner.invoke(db_app, ["current"]).output == f"{head_revision()} (head)\n"


def test_psql_passes_its_arguments_and_exit_code_and_no_password(
    password: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """B115: the command line of a process is public; psql's own `:` variables show what it was given."""
    command = "SELECT 'arg', * FROM (VALUES (1)) AS v"
    assert runner.invoke(db_app, ["psql", "-At", "-v", "ON_ERROR_STOP=1", "-c", command]).exit_code == 0
    assert capfd.readouterr().out == "arg|1\n"
    shell = r"\! tr '\0' ' ' < /proc/$PPID/cmdline"
    runner.invoke(db_app, ["psql", "-c", shell])
    shown = capfd.readouterr().out
    assert "--dbname=postgresql://longlaw@127.0.0.1" in shown
    assert password not in shown
    assert runner.invoke(db_app, ["psql", "-c", "SELECT broken"]).exit_code == 1


def test_current_names_the_missing_migrations(empty_database: MakeDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    with empty_database() as url:
        monkeypatch.setenv("LONGLAW_DATABASE_URL", url)
        outcome = runner.invoke(db_app, ["current"])
        assert outcome.exit_code == 0
        assert outcome.output == f"None (head is {head_revision()}: run `longlaw db upgrade`)\n"
        assert runner.invoke(db_app, ["upgrade"]).output == f"{head_revision()} (head)\n"


def test_check_agrees_with_the_migrations(home: Path) -> None:
    outcome = runner.invoke(db_app, ["check"])
    assert outcome.exit_code == 0, outcome.output
    assert "agree" in outcome.output
    assert list(home.iterdir()) == []


def test_check_lists_what_differs(database_url: str, password: str) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE stray_table (i int)"))
    engine.dispose()
    outcome = runner.invoke(db_app, ["check"])
    assert outcome.exit_code == 1
    assert "remove_table: stray_table" in outcome.output


@pytest.mark.parametrize("command", ["url", "upgrade", "current", "psql", "check"])
def test_every_command_refuses_other_databases_by_name(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGLAW_DATABASE_URL", "mysql://ada:S3cr3tPw@db/laws")
    outcome = runner.invoke(db_app, [command])
    assert outcome.exit_code == 1
    assert "error: Longlaw keeps its results in Postgres alone" in outcome.output
    assert "S3cr3tPw" not in outcome.output


@pytest.mark.parametrize("command", ["upgrade", "current", "check"])
def test_server_that_does_not_answer_is_one_line_without_the_password(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B115."""
    monkeypatch.setenv("LONGLAW_DATABASE_URL", "postgres://ada:S3cr3tPw@127.0.0.1:1/laws")
    outcome = runner.invoke(db_app, [command])
    assert outcome.exit_code == 1
    assert "does not answer" in outcome.output
    assert "S3cr3tPw" not in outcome.output
