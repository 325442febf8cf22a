"""`longlaw data`: build tokenized corpora in the store, list them, look into them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from database.settings import Settings
from workers.corpus import Manifest, corpus_names, find_corpus, open_corpus
from workers.corpus_build import build_corpus
from workers.corpus_sources import CorpusSource, FolderSource, TorchSource
from workers.corpus_tokenizer import Report
from workers.errors import CorpusError

TORCH_SOURCE = "torch"
TORCH_NAME = "torch-sources"
#: Text that a grid of micro models can use up; a folder of one's own is taken whole.
TORCH_BYTES = 3_000_000

data_app = typer.Typer(help="Build and inspect tokenized corpora.", no_args_is_help=True)

Store = Annotated[
    str | None, typer.Option("--store", help="Folder of the store; else LONGLAW_STORE, else .longlaw/store.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@data_app.command()
def build(
    source: Annotated[
        str,
        typer.Argument(
            metavar="[torch|FOLDER]", help="A folder of text or .jsonl files; torch: that library's own sources."
        ),
    ] = TORCH_SOURCE,
    name: Annotated[str | None, typer.Option(help=f"Name for grids; else {TORCH_NAME}, or the folder's own.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Size of the vocabulary that is trained on the text.")] = 512,
    tokenizer: Annotated[Path | None, typer.Option(help="An existing tokenizer.json to use instead.")] = None,
    end_of_text: Annotated[str | None, typer.Option(help="That tokenizer's separator between documents.")] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help=f"Bytes of text to take; else {TORCH_BYTES} from torch, all of a folder.")
    ] = None,
    documents: Annotated[
        Literal["file", "directory"], typer.Option(help="What makes a document in a folder of text files.")
    ] = "file",
    long_share: Annotated[float, typer.Option(help="Share of the text for the long stage.")] = 0.15,
    held_out_share: Annotated[float, typer.Option(help="Share of the text that nothing is trained on.")] = 0.1,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize text into the store. The same text gives the same corpus, whoever builds it and wherever."""
    of_torch = source == TORCH_SOURCE
    taken: CorpusSource = TorchSource() if of_torch else FolderSource(path=Path(source), documents_by=documents)
    name = name or (TORCH_NAME if of_torch else Path(source).resolve().name)
    with _errors_told(), _progress() as report:
        manifest = build_corpus(
            taken,
            store=_root(store),
            name=name,
            vocab_size=vocab_size,
            tokenizer_file=tokenizer,
            end_of_text=end_of_text,
            max_bytes=max_bytes or (TORCH_BYTES if of_torch else None),
            long_share=long_share,
            held_out_share=held_out_share,
            report=report,
        )
    if as_json:
        _print_json(_summary(name, manifest))
    else:
        _print_corpora([(name, manifest)])


@data_app.command("list")
def list_corpora(store: Store = None, as_json: AsJson = False) -> None:
    """List the corpora of the store."""
    with _errors_told():
        root = _root(store)
        found = [(name, open_corpus(root, corpus).manifest) for name, corpus in corpus_names(root).items()]
    if as_json:
        _print_json([_summary(name, manifest) for name, manifest in found])
    elif found:
        _print_corpora(found)
    else:
        typer.echo(f"No corpora in {root}; `longlaw data build` makes one.")


@data_app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of a corpus.")], store: Store = None, as_json: AsJson = False
) -> None:
    """Show a corpus and its documents, after comparing every file with its digest."""
    with _errors_told():
        root = _root(store)
        manifest = open_corpus(root, find_corpus(root, name), verify_digests=True).manifest
    if as_json:
        listed = [dataclasses.asdict(document) for document in manifest.documents]
        _print_json({**_summary(name, manifest), "document_list": listed})
        return
    _print_corpora([(name, manifest)])
    table = Table("document", "split", "tokens", title="Documents")
    for document in manifest.documents:
        table.add_row(document.id, document.split, f"{document.tokens:,}")
    Console().print(table)


def _root(store: str | None) -> Path:
    root = store or Settings().store
    if "://" in root:
        raise CorpusError(f"{root} is no folder: corpora are built and read in one; give --store")
    return Path(root)


def _summary(name: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "name": name,
        "hash": manifest.hash,
        "source": manifest.source,
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        "tokens": {
            "short": manifest.short_tokens,
            "long": manifest.long_tokens,
            "held_out": manifest.held_out_tokens,
        },
        "documents": {split: len(manifest.of(split)) for split in ("short", "long", "held_out")},
    }


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def _print_corpora(corpora: list[tuple[str, Manifest]]) -> None:
    """Two lines for each: a hash is there to be copied, and no table of eighty columns holds it."""
    for name, manifest in corpora:
        typer.echo(f"{name}  {manifest.hash}")
        typer.echo(
            f"  from {manifest.source}, {len(manifest.documents):,} documents, vocabulary {manifest.vocab_size:,}; "
            f"tokens: {manifest.short_tokens:,} short, {manifest.long_tokens:,} long, "
            f"{manifest.held_out_tokens:,} held out"
        )


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar per stage on stderr, gone when all is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        stages = {"listing documents": bars.add_task("listing documents", total=None)}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                bars.stop_task(list(stages.values())[-1])
                stages[stage] = bars.add_task(stage)
            bars.update(stages[stage], completed=done, total=total)

        yield report


@contextmanager
def _errors_told() -> Iterator[None]:
    """Turns an error with a name into one line on stderr and exit code 1."""
    try:
        yield
    except (CorpusError, ValidationError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
