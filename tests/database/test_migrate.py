"""Migrations: at once, twice, half, too old, too new, and compared with the models."""

import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import Engine, inspect, text

from database import migrate
from database.engine import create_engine
from database.errors import DatabaseUnavailableError, SchemaAheadError, SchemaBehindError, SchemaError
from database.migrate import check_at_head, current_revision, head_revision, pending_changes, upgrade
from tests.conftest import MakeDatabase


def test_migrated_database_is_what_the_models_describe(engine: Engine, database_url: str) -> None:
    check_at_head(engine)
    assert current_revision(engine) == head_revision() is not None
    assert pending_changes(database_url) == []


def test_second_upgrade_changes_nothing(engine: Engine, database_url: str) -> None:
    upgrade(database_url)
    check_at_head(engine)


def test_three_processes_may_migrate_an_empty_database_at_once(empty_database: MakeDatabase) -> None:
    """B99."""
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as replicas:
        for _ in range(3):
            with empty_database() as url:
                for outcome in [replicas.submit(upgrade, url) for _ in range(3)]:
                    outcome.result(timeout=120)
                engine = create_engine(url)
                check_at_head(engine)
                with engine.connect() as connection:
                    assert connection.execute(text("SELECT count(*) FROM alembic_version")).scalar_one() == 1
                engine.dispose()
                assert pending_changes(url) == []


def test_verbs_can_be_taken_back_without_a_trace_in_the_read_contract(empty_database: MakeDatabase) -> None:
    """A view that loses columns is made anew: its definition, its comments and the rights to it are what they were."""
    told = text(
        "SELECT c.relname, pg_get_viewdef(c.oid), obj_description(c.oid), c.relacl::text, a.attname,"
        " col_description(c.oid, a.attnum) FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0"
        " WHERE c.relnamespace = 'research'::regnamespace ORDER BY c.relname, a.attnum"
    )
    with empty_database() as url:
        engine = create_engine(url)
        upgrade(url, "0005")
        with engine.connect() as connection:
            before = connection.execute(told).all()
        upgrade(url, "0006")
        with engine.connect() as connection:
            assert len(connection.execute(told).all()) == len(before) + 2
            command.downgrade(migrate._config(connection), "0005")
            connection.commit()
            assert connection.execute(told).all() == before
        engine.dispose()


def test_failing_migration_leaves_nothing_behind(
    empty_database: MakeDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "migrations"
    shutil.copytree(migrate.migrations_folder(), scripts, ignore=shutil.ignore_patterns("versions", "__pycache__"))
    (scripts / "versions").mkdir()
    (scripts / "versions" / "half.py").write_text(
        "from alembic import op\n"
        "revision, down_revision = 'half', None\n"
        "def upgrade():\n"
        "    op.execute('CREATE TABLE first_half (i int)')\n"
        "    op.execute('SELECT 1 / 0')\n"
    )
    monkeypatch.setattr(migrate, "migrations_folder", lambda: scripts)
    with empty_database() as url:
        with pytest.raises(Exception, match="division by zero"):
            upgrade(url)
        engine = create_engine(url)
        assert inspect(engine).get_table_names() == []
        engine.dispose()


def test_database_without_migrations_is_behind_and_the_fix_is_named(empty_database: MakeDatabase) -> None:
    with empty_database() as url:
        engine = create_engine(url)
        with pytest.raises(SchemaBehindError, match="longlaw db upgrade"):
            check_at_head(engine)
        engine.dispose()


def test_database_of_a_newer_version_is_refused_and_kept(engine: Engine, database_url: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'from_the_future'"))
    with pytest.raises(SchemaAheadError, match="from_the_future"):
        check_at_head(engine)
    with pytest.raises(SchemaAheadError, match="from_the_future"):
        upgrade(database_url)
    assert current_revision(engine) == "from_the_future"


def test_unknown_revision_is_an_error_that_names_it(database_url: str) -> None:
    with pytest.raises(SchemaError, match="no_such_revision"):
        upgrade(database_url, "no_such_revision")


def test_server_that_does_not_answer_is_an_error_without_the_password() -> None:
    """B115."""
    with pytest.raises(DatabaseUnavailableError) as caught:
        upgrade("postgres://ada:S3cr3tPw@127.0.0.1:1/laws")
    assert "S3cr3tPw" not in f"{caught.value} {caught.value.__cause__}"


def test_every_kind_of_drift_from_the_models_is_listed(engine: Engine, database_url: str) -> None:
    with engine.begin() as connection:
        table, check = connection.execute(
            text(
                "SELECT conrelid::regclass::text, conname FROM pg_constraint WHERE contype = 'c' AND conrelid <> 0 "
                "AND connamespace = 'public'::regnamespace ORDER BY 1, 2 LIMIT 1"
            )
        ).one()
        connection.execute(text(f"ALTER TABLE {table} DROP CONSTRAINT {check}, ADD COLUMN stray int"))
        connection.execute(text(f"CREATE INDEX stray_index ON {table} (stray)"))
        connection.execute(text("CREATE TABLE stray_table (i int)"))
    assert sorted(pending_changes(database_url)) == [
        f"add_check: {table}.{check}",
        f"remove_column: {table} {table}.stray",
        f"remove_index: {table}.stray_index",
        "remove_table: stray_table",
    ]
