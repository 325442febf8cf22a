"""The environment of a process."""

import os
from pathlib import Path

import pytest

from database.errors import DatabaseUrlError
from database.settings import Settings

PASSWORD = "S3cr3tPw"


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LONGLAW_HOME", "LONGLAW_DATABASE_URL", "LONGLAW_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_everything_lives_below_the_working_directory_by_default(tmp_path: Path) -> None:
    settings = Settings()
    assert settings.home == tmp_path / ".longlaw"
    assert settings.store == str(tmp_path / ".longlaw" / "store")
    assert settings.database_url is None


def test_server_lives_below_home_where_it_can_reach_it(
    reachable_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGLAW_HOME", str(reachable_tmp_path))
    assert Settings().postgres_dir == reachable_tmp_path / "postgres"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs as another user")
def test_homes_that_the_server_cannot_reach_have_folders_of_their_own(
    reachable_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = reachable_tmp_path / "closed"
    closed.mkdir(mode=0o700)
    folders = []
    for name in ("a", "b"):
        monkeypatch.setenv("LONGLAW_HOME", str(closed / name))
        folders.append(Settings().postgres_dir)
    assert len(set(folders)) == 2
    assert not any(folder.is_relative_to(closed) for folder in folders)


def test_store_follows_home_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGLAW_HOME", "/srv/longlaw")
    assert Settings().store == "/srv/longlaw/store"
    monkeypatch.setenv("LONGLAW_STORE", "s3://laws/store")
    assert Settings().store == "s3://laws/store"


def test_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGLAW_DATABASE_URL", "")
    assert Settings().database_url is None


def test_password_is_in_no_representation(monkeypatch: pytest.MonkeyPatch) -> None:
    """B115."""
    monkeypatch.setenv("LONGLAW_DATABASE_URL", f"postgres://ada:{PASSWORD}@db/laws")
    settings = Settings()
    assert PASSWORD not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
    assert settings.database_url is not None
    assert PASSWORD in settings.database_url.get_secret_value()


def test_url_of_something_else_is_refused_without_repeating_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """B115."""
    monkeypatch.setenv("LONGLAW_DATABASE_URL", f"mysql://ada:{PASSWORD}@db/laws")
    with pytest.raises(DatabaseUrlError, match="mysql") as caught:
        Settings()
    assert PASSWORD not in str(caught.value)
