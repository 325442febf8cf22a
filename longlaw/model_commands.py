"""`longlaw model`: bring models from elsewhere into the store, for grids that continue them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from longlaw.local_store import local_store
from workers.folder_model import add_model, own_rope

model_app = typer.Typer(help="Models that somebody else trained.", no_args_is_help=True)


@model_app.callback()
def _model() -> None:
    """Models that somebody else trained."""


@model_app.command()
def add(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face model folder: config.json and safetensors.")],
    store: Annotated[
        str | None, typer.Option("--store", help="Folder or URL of the store; else LONGLAW_STORE, else .longlaw/store.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Bring a causal language model into the store; prints the entry for a grid's `scales`."""
    shape = add_model(folder, local_store(store))
    head_dim, rope_base = own_rope(folder)
    model = {name: value for name, value in dataclasses.asdict(shape).items() if value is not None}
    model["head_dim"] = head_dim
    if rope_base is not None:
        model["rope_base"] = rope_base
    if as_json:
        typer.echo(json.dumps(model, indent=2))
        return
    typer.echo(f"{folder.resolve().name}:")
    typer.echo("  short_tokens_seen: unknown  # D_s in tokens, where it is known")
    typer.echo("  model:")
    for name, value in model.items():
        typer.echo(f"    {name}: {value}")
