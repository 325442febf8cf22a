"""`longlaw merge`: one model from several checkpoints, as a Hugging Face folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from workers.errors import MergeError
from workers.merge import STEPS_MATTER, checkpoint_steps
from workers.merged_folder import SHARD_BYTES, MergedFolder, write_merged
from workers.spec import ObservationRule, RuleName

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def merge_command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist yet.")],
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CHECKPOINT...", help="Folders, oldest first.")],
    rule: Annotated[RuleName, typer.Option(help="raw, last_m, one_sqrt, ema, dare or ties.")] = "last_m",
    decay: Annotated[float | None, typer.Option(help="ema: the weight of a checkpoint one spacing older.")] = None,
    density: Annotated[float | None, typer.Option(help="dare, ties: the share of coordinates to keep.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="dare: seed of what is dropped.")] = 42,
    step: Annotated[
        list[int] | None, typer.Option(help="Optimizer step of each checkpoint, repeated; else what it tells itself.")
    ] = None,
    spacing: Annotated[
        int | None, typer.Option(min=1, help="ema: steps that count as one spacing; else those between checkpoints.")
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="Type to write; else that of the newest checkpoint.")
    ] = None,
    shard_bytes: Annotated[int, typer.Option(min=1, help="The most bytes of one file.")] = SHARD_BYTES,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Merge checkpoints of one training run into a model that transformers loads."""
    _check_parameters(rule, {"--decay": decay, "--density": density, "--step": step, "--spacing": spacing})
    torch.set_num_threads(1)  # blocks are small: more threads only wait for each other
    steps = (step or checkpoint_steps(checkpoints)) if rule in STEPS_MATTER else None
    merging = ObservationRule(
        name=rule,
        m=len(checkpoints),
        spacing_steps=_spacing(steps, spacing) if rule == "ema" and steps is not None else 0,
        decay=decay,
        density=density,
        seed=seed,
    )
    with _progress() as progress:
        task = progress.add_task("merging", total=None)
        written = write_merged(
            checkpoints,
            merging,
            out,
            steps=steps,
            dtype=_DTYPES[dtype] if dtype else None,
            shard_bytes=shard_bytes,
            on_progress=lambda name, done, total: progress.update(task, completed=done, total=total, description=name),
        )
    if as_json:
        typer.echo(json.dumps(_summary(written, rule), indent=2))
    else:
        typer.echo(
            f"{written.folder}: {len(written.averaged)} tensors merged by {rule}, {len(written.copied)} copied from"
            f" {checkpoints[-1]}, {written.size_bytes:,} bytes in {len(written.files)} file(s)"
        )


_TAKES = {
    "one_sqrt": ("--step",),
    "ema": ("--decay", "--step", "--spacing"),
    "dare": ("--density",),
    "ties": ("--density",),
}


def _check_parameters(rule: RuleName, given: Mapping[str, object]) -> None:
    """Refuses what the rule would pass over in silence, and names what it lacks."""
    for option, value in given.items():
        if value is not None and option not in _TAKES.get(rule, ()):
            rules = " and ".join(name for name, options in _TAKES.items() if option in options)
            raise MergeError(f"{option} is of {rules}, not of --rule {rule}: leave it out, or choose another rule")
    for option in ("--decay", "--density"):
        if given[option] is None and option in _TAKES.get(rule, ()):
            raise MergeError(f"--rule {rule} needs {option}, above 0 and at most 1")


def _spacing(steps: tuple[int, ...] | list[int], given: int | None) -> int:
    """The steps of one spacing: as given, or what lies between any two neighbours."""
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    if given is not None or not gaps:
        return given or 0
    if len(gaps) > 1:
        raise MergeError(f"the checkpoints lie {', '.join(map(str, sorted(gaps)))} steps apart: say --spacing STEPS")
    return gaps.pop()


def _summary(written: MergedFolder, rule: str) -> dict[str, object]:
    return {
        "folder": str(written.folder),
        "rule": rule,
        "files": list(written.files),
        "size_bytes": written.size_bytes,
        "averaged": len(written.averaged),
        "copied": len(written.copied),
    }


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
