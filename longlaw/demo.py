"""`longlaw demo`: small grids from start to prediction on this machine, and what came of them in plain words."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.models import GridDetail
from database.errors import DatabaseError
from database.settings import Settings
from fitting.laws import LONG_CONTEXT
from longlaw.client import Client
from longlaw.demo_report import print_report
from longlaw.errors import LonglawError
from longlaw.grid_commands import follow
from longlaw.grid_document import GridFileError, read_grid_file, resolve_corpora
from longlaw.ready_grids import QUICKSTART, ready_grid
from longlaw.stack import Stack, StackError
from longlaw.up import Port, interrupt_on_sigterm, print_urls, serve

_CORPUS = "torch-sources"
_CORPUS_BYTES = 3_000_000
_FIT_WAIT_S = 120.0


def demo_command(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="Grids to run, one after another.", show_default="the quick-start"),
    ] = None,
    exit_when_done: Annotated[bool, typer.Option("--exit", help="Stop at the end instead of serving on.")] = False,
    port: Port = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Training processes; one per core by default.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write all of it as one page there, as `longlaw report` does."),
    ] = None,
) -> None:
    """Train the quick-start grid here, measure LongPPL, fit the law, predict what was held out, then serve.

    Everything is kept in LONGLAW_HOME: a second run finds all of it and trains nothing.
    """
    console = Console()
    interrupt_on_sigterm()
    files = files or [str(ready_grid(QUICKSTART))]
    try:
        for file in files:  # before anything starts
            read_grid_file(file)
        if report is not None and find_spec("matplotlib") is None:
            raise LonglawError("--report needs matplotlib: pip install 'longlaw[plots]'")
        settings = Settings()
        with _building_corpus(settings) as corpus, Stack(settings=settings, api_port=port, workers=workers) as stack:
            console.print(f"Starting Postgres, Ray and the API in {settings.home} ...")
            stack.wait_until_ready()
            _finish(corpus)
            grids = [_run_grid(console, stack, file) for file in files]
            if report is not None:
                _write_report(console, stack, [grid.id for grid in grids], report)
            print_urls(console, stack)
            if exit_when_done:
                console.print("\nStopping; `longlaw up` serves all of this again.")
            else:
                console.print("\nServing until Ctrl-C.")
                serve(stack)
        if any(grid.state != "SUCCEEDED" for grid in grids):
            raise typer.Exit(1)
    except KeyboardInterrupt:
        console.print("Stopped. Everything finished so far is kept; run it again to go on.")
    except (StackError, DatabaseError, LonglawError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _run_grid(console: Console, stack: Stack, file: str) -> GridDetail:
    """Submits the grid, follows it and reports; returns the ended grid."""
    document = resolve_corpora(read_grid_file(file), stack.settings.store)
    with Client(stack.url, meanwhile=stack.watch) as client:
        created = client.submit(document)
        tokens = created.plan["tokens"]
        console.print(
            f"Grid {created.name}: {created.plan['cells']} cells. Planned: {tokens['train']:,} tokens to train where "
            f"independent runs would take {tokens['independent']:,}.",
            highlight=False,
            soft_wrap=True,
        )
        if tokens["train"] == 0:
            console.print("Everything it asks for is there already; nothing is trained.")
        follow(client, created.id, console)
        _wait_for_fits(console, client, stack, created.id)
        print_report(console, client, created.id)
        return client.grid(created.id)


def _write_report(console: Console, stack: Stack, grid_ids: Sequence[str], directory: Path) -> None:
    from longlaw.report_command import write_report  # brings matplotlib along, an extra

    with Client(stack.url, meanwhile=stack.watch) as client:
        page = write_report(client, grid_ids, directory)
    console.print(f"The report is in {page}", highlight=False, soft_wrap=True)


def _wait_for_fits(console: Console, client: Client, stack: Stack, grid_id: str) -> None:
    """Returns when every series of the grid has the fits that all its observations allow."""
    waiting = set(client.grid(grid_id).series)
    deadline_s = time.monotonic() + _FIT_WAIT_S
    with console.status("Fitting the law ...") if console.is_terminal else contextlib.nullcontext():
        while waiting and time.monotonic() < deadline_s:
            stack.watch()
            waiting = {series for series in waiting if not _is_fitted(client, series)}
            time.sleep(0.3)


def _is_fitted(client: Client, series: str) -> bool:
    """Whether no fit of the series is on its way; that of all rows and those with held-out rows are queued together."""
    rows = list(client.observations(series=series))
    usable = [row for row in rows if row.short_tokens is not None]  # the law has a term of D_s
    if len({(row.n_params, row.short_tokens, row.long_tokens) for row in usable}) < LONG_CONTEXT.n_parameters:
        return True
    fits = list(client.fits(series=series))
    if any(fit.state in ("PENDING", "RUNNING") for fit in fits):
        return False
    pooled = next((fit for fit in fits if fit.holdout is None), None)
    return pooled is not None and (pooled.state == "FAILED" or (pooled.n_observations or 0) >= len(usable))


@contextlib.contextmanager
def _building_corpus(settings: Settings) -> Iterator[subprocess.Popen[str]]:
    """Tokenizes the demo's corpus beside everything else that starts; it is there at once the second time."""
    settings.home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "longlaw.cli", "data", "build", "torch", "--name", _CORPUS]
    command += ["--max-bytes", str(_CORPUS_BYTES), "--store", settings.store, "--json"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _finish(corpus: subprocess.Popen[str]) -> None:
    _, errors = corpus.communicate()
    if corpus.returncode:
        raise GridFileError(f"The corpus could not be built:\n{errors.strip()}")
