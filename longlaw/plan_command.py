"""`longlaw grid plan FILE`: what a grid would train and cost, with no service and nothing stored."""

from __future__ import annotations

import json
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from longlaw.grid_document import GridFileError, read_grid_text
from orchestrator.errors import GridError
from orchestrator.grid import load_grid
from orchestrator.plan import plan
from orchestrator.plan_document import plan_document
from orchestrator.plan_values import Plan

_USAGE_ERROR = 2


def plan_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A grid file, YAML or JSON; - reads standard input.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show what a grid would train and cost, from scratch; needs no service."""
    try:
        text, format = read_grid_text(file)
        planned = plan(load_grid(text, format=format))
    except GridError as error:
        _fail(file, [str(problem) for problem in error.problems])
    except GridFileError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_USAGE_ERROR) from None
    if as_json:
        typer.echo(json.dumps(plan_document(planned), indent=2, allow_nan=False))
    else:
        _show(planned, Console())


def _fail(file: str, problems: list[str]) -> NoReturn:
    source = "standard input" if file == "-" else file
    typer.echo(f"{source} cannot be planned:", err=True)
    for problem in problems:
        typer.echo(f"  {problem}", err=True)
    raise typer.Exit(_USAGE_ERROR)


def _show(planned: Plan, console: Console) -> None:
    diagnostics = sum(not evaluation.asked for evaluation in planned.evaluations)
    totals = Table(box=None, show_header=False, pad_edge=False)
    totals.add_column()
    totals.add_column(justify="right")
    totals.add_column()
    totals.add_row("cells", f"{len(planned.cells):,}", f"of {len(planned.series)} series")
    totals.add_row("segments", f"{len(planned.segments):,}", "what cells share is trained once")
    note = f"{diagnostics:,} of them between the cells" if diagnostics else "one for each cell and rule"
    totals.add_row("evaluations", f"{len(planned.evaluations):,}", note)
    totals.add_row("tokens to train", f"{planned.tokens_train:,}", _saving(planned))
    totals.add_row("if independent", f"{planned.tokens_independent:,}", "every cell trained by itself")
    share = planned.evaluation_flops / planned.flops if planned.flops else 0.0
    totals.add_row("operations", f"{planned.flops:.4g}", f"{share:.1%} of them to evaluate")
    rate = f"at {planned.gpu_flops:.3g} FLOP/s, {planned.gpu_utilisation:.0%} of it reached"
    hours = f"{planned.gpu_hours:,.0f}" if planned.gpu_hours >= 100 else f"{planned.gpu_hours:.3g}"
    totals.add_row("GPU-hours", hours, rate)
    totals.add_row("checkpoints", _bytes(planned.checkpoint_bytes), "weights and optimizer moments, float32")

    scales = Table(box=None, pad_edge=False)
    for column in ("scale", "N", "cells", "tokens to train", "/ N", "if independent", "/ N"):
        scales.add_column(column, justify="left" if column == "scale" else "right")
    for row in planned.per_scale:
        scales.add_row(
            row.scale,
            f"{row.n_params:,}",
            f"{row.cells:,}",
            _tokens(row.tokens_train),
            f"{row.tokens_train / row.n_params:,.1f}",
            _tokens(row.tokens_independent),
            f"{row.tokens_independent / row.n_params:,.1f}",
        )
    console.print(f"Plan of {planned.name!r}, protocol {planned.protocol}", markup=False, highlight=False)
    console.print(totals, highlight=False)
    console.print()
    console.print(scales, highlight=False)
    for warning in planned.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)


def _saving(planned: Plan) -> str:
    if not planned.tokens_train:
        return "nothing to train"
    return f"{planned.tokens_independent / planned.tokens_train:.2f} times fewer than independent cells"


def _tokens(count: int) -> str:
    """Exact up to a billion, which fits a column; the exact numbers are in the JSON."""
    return f"{count:,}" if count < 1e9 else f"{count / 1e9:,.3f} B"


def _bytes(count: int) -> str:
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.4g} {unit}"
