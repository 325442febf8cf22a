"""Where a process finds its database and its files: environment variables, read once in `main`."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _is_closed(folder: Path) -> bool:
    return folder.exists() and not folder.stat().st_mode & stat.S_IXOTH


def _default_store(data: dict[str, Any]) -> str:
    return str(data["home"] / "store") if "home" in data else ""


class Settings(BaseSettings):
    """The environment of a Longlaw process. Build it in `main` and hand it down.

    Attributes:
        home: `LONGLAW_HOME`, what this machine keeps between runs; `./.longlaw` by default.
        database_url: `LONGLAW_DATABASE_URL`, any Postgres server; None means the embedded one below `home`.
        store: `LONGLAW_STORE`, a folder or fsspec URL of checkpoints, corpora and references; `home/store` by default.
    """

    model_config = SettingsConfigDict(
        env_prefix="LONGLAW_",
        env_ignore_empty=True,
        frozen=True,
        hide_input_in_errors=True,  # a mistyped URL holds a password too
    )

    home: Annotated[Path, AfterValidator(_absolute)] = Field(default=Path(".longlaw"), validate_default=True)
    database_url: SecretStr | None = None
    store: str = Field(default_factory=_default_store)

    @field_validator("database_url")
    @classmethod
    def _is_postgres(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            from database.engine import parse_url  # brings SQLAlchemy along, which commands on files do without

            parse_url(url.get_secret_value())
        return url

    @property
    def store_cache(self) -> Path:
        """Where this machine mirrors a store that is a URL."""
        return self.home / "store-cache"

    @property
    def postgres_dir(self) -> Path:
        """The folder of the embedded server: below `home`, or below /var/lib where the server could not reach it.

        Postgres does not run as root, so root's own closed home is no place for it; the folder's name then tells homes
        apart.
        """
        if os.geteuid() == 0 and any(_is_closed(folder) for folder in self.home.parents):
            digest = hashlib.sha256(str(self.home).encode()).hexdigest()[:12]
            return Path("/var/lib/longlaw") / digest / "postgres"
        return self.home / "postgres"
