"""`python -m api`: serve the REST API on one address until SIGTERM or Ctrl-C."""

from __future__ import annotations

import ipaddress
import sys
from typing import Annotated

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from database.embedded import running_url
from database.engine import create_engine
from database.errors import DatabaseError, DatabaseUnavailableError
from database.settings import Settings


class ApiSettings(BaseSettings):
    """Where the API listens.

    Attributes:
        host: `LONGLAW_API_HOST`, an address of this machine.
        port: `LONGLAW_API_PORT`.
        allow_public: `LONGLAW_API_ALLOW_PUBLIC`, to listen where other machines reach it.
    """

    model_config = SettingsConfigDict(env_prefix="LONGLAW_API_", env_ignore_empty=True, frozen=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    allow_public: bool = False


class PublicBindError(Exception):
    """The API would be open to other machines, and it cannot tell who asks."""


def check_bind(settings: ApiSettings) -> None:
    """Lets the API listen on this machine alone, unless the settings allow more.

    Raises:
        PublicBindError: the host is not a loopback address and nobody said that this is meant.
    """
    if settings.allow_public or _is_loopback(settings.host):
        return
    raise PublicBindError(
        f"LONGLAW_API_HOST={settings.host} would open the API to other machines, and it has no access tokens yet: "
        "anyone who reaches it could launch grids. Listen on 127.0.0.1, or set LONGLAW_API_ALLOW_PUBLIC=1 where a "
        "firewall or a proxy decides who gets here."
    )


def main() -> None:
    """Serves until interrupted; exits with 1 and one line on stderr where it cannot start."""
    try:
        listen, settings = ApiSettings(), Settings()
        check_bind(listen)
        engine = create_engine(_database_url(settings), application_name="longlaw-api")
    except (PublicBindError, DatabaseError, ValidationError) as error:
        sys.exit(f"error: {error}")
    import uvicorn  # and what follows: a second of imports, which a process that may not serve does without

    from api.app import create_app

    app = create_app(engine, dispose=True)
    uvicorn.run(app, host=listen.host, port=listen.port, server_header=False, timeout_graceful_shutdown=10)


def _database_url(settings: Settings) -> str:
    if settings.database_url is not None:
        return settings.database_url.get_secret_value()
    url = running_url(settings.postgres_dir)
    if url is None:
        raise DatabaseUnavailableError(
            f"The embedded Postgres in {settings.postgres_dir} is not running. `longlaw up` starts it with the "
            "API; LONGLAW_DATABASE_URL names another server."
        )
    return url


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
