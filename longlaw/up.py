"""`longlaw up`: run everything on this machine until Ctrl-C."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from database.errors import DatabaseError
from database.settings import Settings
from longlaw.connection import DEFAULT_URL
from longlaw.stack import Stack, StackError

Port = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        envvar="LONGLAW_API_PORT",
        help="Port of the API and dashboard on loopback; else the first free one from 8000 on.",
    ),
]


def up_command(
    port: Port = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Training processes; one per core by default.")] = None,
) -> None:
    """Run Postgres, the scheduler with its workers, the API and the dashboard on this machine until Ctrl-C."""
    console = Console()
    interrupt_on_sigterm()
    try:
        with Stack(settings=Settings(), api_port=port, workers=workers) as stack:
            stack.wait_until_ready()
            print_urls(console, stack)
            serve(stack)
    except KeyboardInterrupt:
        console.print("Stopped. Everything finished so far is kept.")
    except (StackError, DatabaseError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def print_urls(console: Console, stack: Stack) -> None:
    console.print(f"Dashboard  {stack.url}/", soft_wrap=True)
    console.print(f"REST       {stack.url}/v1/grids   (description: {stack.url}/openapi.json)", soft_wrap=True)
    if stack.url != DEFAULT_URL:
        console.print(f"Clients    export LONGLAW_URL={stack.url}   (they ask {DEFAULT_URL} else)", soft_wrap=True)
    console.print("SQL        longlaw db psql   (views in the schema research)", soft_wrap=True)
    console.print(f"Logs       {stack.logs}", soft_wrap=True)


def serve(stack: Stack) -> None:
    """Watches the stack until interrupted."""
    while True:
        stack.watch()
        time.sleep(1.0)


def interrupt_on_sigterm() -> None:
    """A polite SIGTERM ends the stack like Ctrl-C: plain Python would not run any clean-up."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
