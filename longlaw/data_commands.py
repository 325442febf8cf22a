"""`longlaw data`: build tokenized corpora in the store, list them, look into them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from longlaw.local_store import local_store, tokenizer_at
from workers.conversations import PLAIN_CHAT, chat_of
from workers.corpus import Manifest, corpus_names, find_corpus, open_corpus
from workers.corpus_build import build_corpus
from workers.corpus_rows import RowFields
from workers.corpus_sources import CorpusSource, DocumentsBy, HeldOutSource, TorchSource, source_at
from workers.corpus_tokenizer import Report
from workers.errors import CorpusError, StoreError
from workers.mixture import describe_packing
from workers.spec import DataMix, Packing, Split

TORCH_SOURCE = "torch"
TORCH_NAME = "torch-sources"
NO_SOURCE = "none"
HELD_OUT_NAME = "held-out"
#: Text that a grid of micro models can use up; a folder of one's own is taken whole.
TORCH_BYTES = 3_000_000
#: Far beyond every sequence, and safe in 64 bits.
_LONGEST = 1 << 40

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
            metavar="[torch|none|PATH]",
            help="A folder of text, .jsonl or .parquet files, one such file, or a Hugging Face dataset on disk; torch:"
            " that library's own sources; none: nothing to train on.",
        ),
    ] = TORCH_SOURCE,
    name: Annotated[str | None, typer.Option(help=f"Name for grids; else {TORCH_NAME}, or the folder's own.")] = None,
    vocab_size: Annotated[
        int, typer.Option(max=1_000_000, help="Size of the vocabulary that is trained on the text.")
    ] = 512,
    tokenizer: Annotated[
        str | None, typer.Option(help="An existing tokenizer.json to use instead, or the corpus whose to use.")
    ] = None,
    end_of_text: Annotated[str | None, typer.Option(help="That tokenizer's separator between documents.")] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help=f"Bytes of text to take; else {TORCH_BYTES} from torch, all of a folder.")
    ] = None,
    documents: Annotated[DocumentsBy, typer.Option(help="What makes a document in a folder of text files.")] = "file",
    text_field: Annotated[str, typer.Option(help="Field of a row that holds its text.")] = "text",
    ids_field: Annotated[
        str | None, typer.Option(help="Field that holds token ids instead, made by the given tokenizer.")
    ] = None,
    prompt_field: Annotated[
        str | None, typer.Option(help="Field that holds a prompt; only the answer to it is learned.")
    ] = None,
    answer_field: Annotated[str | None, typer.Option(help="Field that holds the answer to that prompt.")] = None,
    messages_field: Annotated[
        str | None,
        typer.Option(help="Field that holds messages, each a role and a content; only the assistant's are learned."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with the chat template for messages, if not the tokenizer's own.")
    ] = None,
    group_by: Annotated[
        str | None, typer.Option(help="Field whose equal values make one document of their rows: a repository's name.")
    ] = None,
    long_share: Annotated[float, typer.Option(help="Share of the text for the long stage.")] = 0.15,
    held_out_share: Annotated[float, typer.Option(help="Share of the text that nothing is trained on.")] = 0.1,
    held_out: Annotated[
        Path | None, typer.Option(help="Where held-out documents come from instead: a path as for the source.")
    ] = None,
    held_out_field: Annotated[str, typer.Option(help="Its field of text.")] = "text",
    held_out_ids_field: Annotated[str | None, typer.Option(help="Its field of token ids instead.")] = None,
    held_out_ids_tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer.json that made those ids, if not the corpus's.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(min=1, help="Leave out its documents that are shorter.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Cut its documents after as many tokens.")] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Take that many of those left, from the first on.")] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize text into the store. The same text gives the same corpus, whoever builds it and wherever."""
    with _errors_told(), _progress() as report:
        if held_out is None and (held_out_field, held_out_ids_field, held_out_ids_tokenizer) != ("text", None, None):
            raise CorpusError(
                "--held-out-field and --held-out-ids-field, -tokenizer tell how to read --held-out: give it"
            )
        if end_of_text is not None and tokenizer is None:
            raise CorpusError("--end-of-text names a token of --tokenizer: give that too")
        root = local_store(store)
        tokenizer_file = None if tokenizer is None else tokenizer_at(root, tokenizer)
        rows = RowFields(
            text=text_field,
            ids=ids_field,
            group=group_by,
            prompt=prompt_field,
            answer=answer_field,
            messages=messages_field,
            chat=PLAIN_CHAT if messages_field is None else chat_of(tokenizer_file, chat_template),
        )
        if rows.turns and source in (TORCH_SOURCE, NO_SOURCE):
            raise CorpusError(f"{source} has no rows: --prompt-field, --answer-field and --messages-field read rows")
        if chat_template is not None and messages_field is None:
            raise CorpusError("--chat-template writes messages: give --messages-field")
        taken, own_name = _source(source, documents, rows)
        name = own_name if name is None else name
        before = corpus_names(root).get(name)
        if held_out is not None:
            kept_apart = HeldOutSource(
                source=source_at(held_out, rows=RowFields(text=held_out_field, ids=held_out_ids_field)),
                min_tokens=min_tokens,
                max_tokens=max_tokens,
                first=first,
                ids_tokenizer=held_out_ids_tokenizer,
            )
        elif taken is None:
            raise CorpusError("a corpus of nothing to train on needs --held-out")
        elif (min_tokens, max_tokens, first) != (1, None, None):
            raise CorpusError(
                "--min-tokens, --max-tokens and --first choose among the documents of --held-out: give it"
            )
        else:
            kept_apart = None
        manifest = build_corpus(
            taken,
            store=root,
            name=name,
            vocab_size=vocab_size,
            tokenizer_file=tokenizer_file,
            end_of_text=end_of_text,
            max_bytes=max_bytes or (TORCH_BYTES if source == TORCH_SOURCE else None),
            long_share=long_share,
            held_out_share=held_out_share,
            held_out=kept_apart,
            report=report,
        )
    if before not in (None, manifest.hash):
        typer.echo(f"{name} was the name of {before} until now; that corpus stays, by its hash", err=True)
    if as_json:
        _print_json(_summary(name, manifest))
    else:
        _print_corpora([(name, manifest)])


@data_app.command("list")
def list_corpora(store: Store = None, as_json: AsJson = False) -> None:
    """List the corpora of the store."""
    with _errors_told():
        root = local_store(store)
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
        root = local_store(store)
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


@data_app.command()
def describe(
    name: Annotated[str, typer.Argument(help="Name of a corpus.")],
    seq_len: Annotated[int, typer.Option(min=1, max=_LONGEST, help="Tokens in a sequence.")],
    split: Annotated[Split, typer.Option(help="The split that is trained on.")] = "long",
    packing: Annotated[Packing, typer.Option(help="Keep documents apart, or cut the split as one text.")] = "documents",
    min_document_tokens: Annotated[int, typer.Option(min=0, max=_LONGEST, help="Leave shorter documents out.")] = 0,
    full_length_share: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of sequences that are one document.")
    ] = None,
    old_length: Annotated[
        int | None, typer.Option(min=1, max=_LONGEST, help="Length trained on before, to see past.")
    ] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Tell what sequences of a length a corpus gives, and whether positions past an old length really occur."""
    with _errors_told():
        root = local_store(store)
        corpus = open_corpus(root, find_corpus(root, name))
        data = DataMix(
            corpus=corpus.hash,
            split=split,
            packing=packing,
            min_document_tokens=min_document_tokens,
            full_length_share=full_length_share,
        )
        told = describe_packing(corpus, data, seq_len=seq_len, old_length=old_length)
    if as_json:
        _print_json({"name": name, "hash": corpus.hash, **dataclasses.asdict(told)})
        return
    typer.echo(
        f"{name}, {split} split, sequences of {seq_len:,}: {told.sequences_per_epoch:,} in an epoch, "
        f"{told.full_length_sequences:,} of them one document from the first token to the last"
    )
    typer.echo(
        f"  {told.documents:,} documents of {told.tokens:,} tokens qualify, {told.full_length_documents:,} of "
        f"{told.full_length_tokens:,} are at least as long as a sequence"
    )
    typer.echo(f"  positions reach {told.largest_position:,}")
    if told.share_past_old_length is not None:
        typer.echo(f"  {told.share_past_old_length:.2%} of the tokens lie at position {old_length:,} or beyond")


def _source(source: str, documents: DocumentsBy, rows: RowFields) -> tuple[CorpusSource | None, str]:
    """What is trained on, and what the corpus is called if nobody says."""
    if source == TORCH_SOURCE:
        return TorchSource(), TORCH_NAME
    if source == NO_SOURCE:
        return None, HELD_OUT_NAME
    if not source:
        raise CorpusError("the source is empty: give a folder or file, torch or none")
    path = Path(source)
    return source_at(path, documents_by=documents, rows=rows), path.stem if path.is_file() else path.resolve().name


def _summary(name: str, manifest: Manifest) -> dict[str, Any]:
    answers = {} if manifest.answers is None else {"answers": dataclasses.asdict(manifest.answers)}
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
        **answers,
    }


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def _print_corpora(corpora: list[tuple[str, Manifest]]) -> None:
    """Two or three lines for each: a hash is there to be copied, and no table of eighty columns holds it."""
    for name, manifest in corpora:
        typer.echo(f"{name}  {manifest.hash}")
        typer.echo(
            f"  from {manifest.source}, {len(manifest.documents):,} documents, vocabulary {manifest.vocab_size:,}; "
            f"tokens: {manifest.short_tokens:,} short, {manifest.long_tokens:,} long, "
            f"{manifest.held_out_tokens:,} held out"
        )
        if (answers := manifest.answers) is not None:
            chat = {"joined": "prompt and answer", "plain": "messages, written plainly"}.get(answers.chat)
            typer.echo(
                f"  learned: the answers, {answers.short_tokens:,} tokens short, {answers.long_tokens:,} long; rows of "
                f"{chat or f'messages, by the chat template {str(answers.template)[:12]}'}; "
                f"{answers.left_out:,} without an answer left out"
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
    except (CorpusError, StoreError, ValidationError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
