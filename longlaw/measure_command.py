"""`longlaw measure`: LongPPL of a Hugging Face model folder, without any service or grid."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from longlaw.local_store import local_store, tokenizer_at
from workers.corpus import Corpus, corpus_names, open_corpus
from workers.corpus_build import build_corpus
from workers.corpus_sources import HeldOutSource, source_at
from workers.errors import CorpusError, ReferenceModelError
from workers.longppl import measure
from workers.progress import Report
from workers.reference_digest import reference_digest
from workers.reference_huggingface import load_model
from workers.results import Evaluation
from workers.spec import Chunking, EvaluationDocuments, Evaluator, Reference

COPY = "copy"


def measure_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder: safetensors and tokenizer.")],
    reference: Annotated[
        str, typer.Option(metavar="FOLDER|copy", help="The model that selects key tokens; copy: counts of a corpus.")
    ],
    documents: Annotated[
        str, typer.Option(metavar="FILE|CORPUS", help="Texts (.jsonl, .parquet, a folder), or a corpus of the store.")
    ],
    min_tokens: Annotated[
        int | None, typer.Option(min=2, help="Leave shorter documents out; else half of --length.")
    ] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Measure so many documents; else all.")] = None,
    length: Annotated[
        int, typer.Option(min=4, max=1 << 40, help="Cut documents after so many of the reference's tokens.")
    ] = 32_768,
    chunk_length: Annotated[int, typer.Option(min=1, max=1 << 40, help="Tokens of local context.")] = 4096,
    stride: Annotated[int, typer.Option(min=1, max=1 << 40, help="Tokens that share one local window.")] = 1024,
    mode: Annotated[
        Literal["exact", "pku"],
        typer.Option(help="Score every token past the first chunk, or the public implementation's windows."),
    ] = "exact",
    gain: Annotated[float, typer.Option(help="Key tokens gain more than so many nats by full context.")] = 2.0,
    ceiling: Annotated[float, typer.Option(help="Key tokens have a loss below this, in nats.")] = 2.0,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|CORPUS",
            help="The model's tokenizer.json, or the corpus whose it is, where its folder has none.",
        ),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Keeps the reference's losses; else LONGLAW_STORE, else .longlaw/store.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON, with sums and counts of every document.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure LongPPL, ShortPPL and perplexity of a model. A reference scores the documents once, for all models."""
    if save is not None:
        _check_writable(save)
    root = local_store(store)
    if tokenizer is None and (model / "config.json").is_file() and not (model / "tokenizer.json").is_file():
        raise ReferenceModelError(
            f"{model} holds no tokenizer.json: give --tokenizer, a file or the corpus it was trained on"
        )
    least = length // 2 if min_tokens is None else min_tokens
    selector = _reference(reference)
    measured, own_tokenizer = load_model(
        model, tokenizer_file=None if tokenizer is None else tokenizer_at(root, tokenizer)
    )
    with _progress() as report:
        corpus = _corpus(documents, reference, root, least=least, first=first, report=report)
        evaluator = Evaluator(
            reference=selector,
            documents=EvaluationDocuments(
                corpus=corpus.hash, count=first or _long_enough(corpus, least), length=length, min_length=least
            ),
            chunking=Chunking(length=chunk_length, stride=stride, mode=mode),
            gain_threshold=gain,
            full_nll_ceiling=ceiling,
        )
        found = measure(measured, evaluator, corpus=corpus, store=root, tokenizer=own_tokenizer, report=report)
    told = _told(model, evaluator, found)
    if save is not None:
        save.write_text(
            json.dumps({**told, "documents": [asdict(score) for score in found.documents]}, indent=2) + "\n"
        )
    if as_json:
        typer.echo(json.dumps(told, indent=2, allow_nan=False))
    else:
        _show(found)


def _check_writable(save: Path) -> None:
    """Before hours of measuring, not after.

    Raises:
        OSError: naming the file, if it cannot be written.
    """
    save.parent.mkdir(parents=True, exist_ok=True)
    existed = save.exists()
    save.open("a").close()
    if not existed:
        save.unlink()


def _corpus(documents: str, reference: str, store: Path, *, least: int, first: int | None, report: Report) -> Corpus:
    """A corpus of the store with this name, else one that is only measured, of the texts at this path.

    Such texts are counted and later cut by the reference's tokenizer, so that every evaluated model gets the same ones.
    """
    names = corpus_names(store)
    if documents in names:
        if Path(documents).exists():
            typer.echo(f"{documents} is taken as the corpus of that name; ./{documents} is what lies here", err=True)
        return open_corpus(store, names[documents])
    path = Path(documents)
    if not path.exists():
        known = ", ".join(sorted(names)) or "none"
        raise CorpusError(f"{documents} is neither a file or folder nor a corpus of {store}; corpora: {known}")
    if reference == COPY:
        raise CorpusError(
            "the reference copy counts a corpus's training tokens: give --documents the name of a corpus"
            " (`longlaw data build`), or --reference a model's folder"
        )
    manifest = build_corpus(
        None,
        store=store,
        name=f"measured-{re.sub('[^A-Za-z0-9._-]', '-', path.stem)}",
        tokenizer_file=Path(reference) / "tokenizer.json",
        end_of_text=_end_of_text(Path(reference)),
        held_out=HeldOutSource(source=source_at(path), min_tokens=least, first=first),
        report=report,
    )
    return open_corpus(store, manifest.hash)


def _end_of_text(folder: Path) -> str | None:
    """What tokenizer_config.json calls `eos_token`: a corpus has such a token, if only to separate what is trained."""
    try:
        token = json.loads((folder / "tokenizer_config.json").read_text()).get("eos_token")
    except (FileNotFoundError, ValueError):
        return None
    return token.get("content") if isinstance(token, dict) else token


def _reference(reference: str) -> Reference:
    if reference == COPY:
        return Reference(kind="copy")
    return Reference(kind="huggingface", path=reference, digest=reference_digest(Path(reference)))


def _long_enough(corpus: Corpus, least: int) -> int:
    count = sum(len(document.tokens) >= least for document in corpus.held_out)
    if not count:
        raise CorpusError(f"no held-out document of corpus {corpus.hash} has {least} tokens: lower --min-tokens")
    return count


def _told(model: Path, evaluator: Evaluator, found: Evaluation) -> dict[str, Any]:
    values = {name: value for name, value in asdict(found).items() if name not in ("documents", "metrics", "key_gap")}
    for name in ("longppl", "shortppl", "ppl"):
        logarithm = values[f"log_{name}"]
        values[name] = None if logarithm is None else math.exp(logarithm)
    return {
        "model": str(model),
        **values,
        "n_documents": len(found.documents),
        "evaluator": asdict(evaluator),
        "evaluator_id": evaluator.id,
    }


def _show(found: Evaluation) -> None:
    table = Table("", "value", "log", "std. error of log", "tokens")
    for name, logarithm, error, count in (
        ("LongPPL", found.log_longppl, found.log_longppl_se, found.key_count),
        ("ShortPPL", found.log_shortppl, found.log_shortppl_se, found.short_count),
        ("PPL", found.log_ppl, found.log_ppl_se, found.all_count),
    ):
        value = None if logarithm is None else math.exp(logarithm)
        table.add_row(
            name, *("-" if item is None else f"{item:.4f}" for item in (value, logarithm, error)), f"{count:,}"
        )
    console = Console()
    console.print(table)
    console.print(f"{len(found.documents)} documents{f'; {found.reason}' if found.reason else ''}", highlight=False)


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar per stage on stderr, gone when all is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=total)

        yield report
