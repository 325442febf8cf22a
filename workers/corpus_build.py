"""Building a corpus: which documents go into which split, tokenized and written into the store under their hash."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from workers import mirror
from workers.answers import AnswerWriter
from workers.conversations import JOINED_CHAT
from workers.corpus import (
    FORMAT,
    NAME,
    AnswersOrigin,
    CorpusSplit,
    DocumentEntry,
    FileEntry,
    Manifest,
    answers_file,
    file_sha256,
    open_corpus,
    token_dtype,
    tokenizer_hash,
)
from workers.corpus_encoding import held_out_documents, training_documents
from workers.corpus_rows import TEXT_ROWS, RowFields, SourceDocument
from workers.corpus_sources import CorpusSource, HeldOutSource
from workers.corpus_tokenizer import END_OF_TEXT, Report, end_of_text_id, load_tokenizer, train_tokenizer
from workers.errors import CorpusError
from workers.spec import Split

#: A document above this share of `max_bytes` is left out: it would be most of a split.
_LARGEST_SHARE = 1 / 20
#: A name is a file in the store, and gets a suffix while that is written.
_LONGEST_NAME = 200
_TRAINED: tuple[Split, ...] = ("short", "long")


def build_corpus(
    source: CorpusSource | None,
    *,
    store: Path,
    name: str,
    vocab_size: int = 512,
    tokenizer_file: Path | None = None,
    end_of_text: str | None = None,
    max_bytes: int | None = None,
    long_share: float = 0.15,
    held_out_share: float = 0.1,
    held_out: HeldOutSource | None = None,
    report: Report | None = None,
) -> Manifest:
    """Tokenizes `source` into the store and lets `name` stand for the result.

    Documents are taken in the order of the hash of their ids while they fit into `max_bytes` of text; one that is
    larger than a twentieth of that is left out. A document belongs to one split as a whole. Documents of one Parquet
    row group stay together, in the order of the hash of its name. Rows of turns without an answer are left out, and
    counted in the manifest.

    Args:
        source: Documents to train on; None where the corpus is only to be measured with (`held_out`).
        vocab_size: Size of the byte-level BPE that is trained on the training documents.
        tokenizer_file: An existing `tokenizer.json` to use instead.
        end_of_text: Its separator token, if it is none of the usual names.
        long_share: Share of the bytes for the long stage; the short stage gets what the other two leave.
        held_out_share: Share of the bytes that no stage trains on; of no effect with `held_out`.
        held_out: Where held-out documents come from instead.
        report: Called with a stage's name, what is done and what there is to do, in bytes.

    Raises:
        CorpusError: if a source is empty or unreadable, has too few documents or no answer where rows are to have some,
            or has a document in common with `held_out`.
    """
    if not NAME.fullmatch(name):
        raise CorpusError(f'corpus name "{name}": use letters, digits, ".", "_" and "-"')
    if len(name) > _LONGEST_NAME:
        raise CorpusError(f"the corpus name has {len(name)} characters: use at most {_LONGEST_NAME}")
    report = report or (lambda stage, done, total: None)
    training = _training(source, max_bytes, long_share, None if held_out else held_out_share)
    if tokenizer_file is not None:
        tokenizer = load_tokenizer(tokenizer_file)
    elif source is not None:
        tokenizer = train_tokenizer([*training.splits["short"], *training.splits["long"]], vocab_size, report)
        end_of_text = END_OF_TEXT
    else:
        raise CorpusError("a corpus without training documents needs the tokenizer of the models it will measure")
    end_of_text_token = end_of_text_id(tokenizer, end_of_text)

    corpora = store / "corpora"
    building = corpora / f".building-{uuid.uuid4().hex}"
    building.mkdir(parents=True)
    try:
        manifest = _write(building, training, held_out, tokenizer, end_of_text_token, report)
        _settle(building, corpora / manifest.hash)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    mirror.publish(store, f"corpora/{manifest.hash}")
    _point(corpora / "names" / name, manifest.hash)
    mirror.publish(store, f"corpora/names/{name}")
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """What is trained on: documents of each split, without "held_out" where those come from elsewhere."""

    label: str = "nothing"
    rows: RowFields = TEXT_ROWS
    left_out: int = 0
    splits: dict[CorpusSplit, list[SourceDocument]]


def _training(
    source: CorpusSource | None, max_bytes: int | None, long_share: float, held_out_share: float | None
) -> _Training:
    if source is None:
        return _Training(splits={"short": [], "long": []})
    shares: dict[CorpusSplit, float] = {"short": 1 - long_share - (held_out_share or 0.0), "long": long_share}
    if held_out_share is not None:
        shares["held_out"] = held_out_share
    if not all(0 < share < 1 for share in shares.values()):
        raise CorpusError("long_share and held_out_share must be positive and leave something to the short stage")
    listed = source.documents()
    answered = _answered(listed)
    return _Training(
        label=source.label,
        rows=source.rows,
        left_out=len(listed) - len(answered),
        splits=_split(_choose(answered, max_bytes), shares),
    )


def _answered(documents: list[SourceDocument]) -> list[SourceDocument]:
    answered = [document for document in documents if document.answered]
    if not answered:
        raise CorpusError(f"none of {len(documents)} rows has an answer (of messages, a turn of the assistant's)")
    return answered


def _choose(documents: list[SourceDocument], max_bytes: int | None) -> list[SourceDocument]:
    ordered = sorted(documents, key=lambda document: hashlib.sha256((document.near or document.id).encode()).digest())
    if max_bytes is None:
        return ordered
    chosen, taken = [], 0
    for document in ordered:
        if document.n_bytes <= max_bytes * _LARGEST_SHARE and taken + document.n_bytes <= max_bytes:
            chosen.append(document)
            taken += document.n_bytes
    return chosen


def _split(
    documents: Sequence[SourceDocument], shares: dict[CorpusSplit, float]
) -> dict[CorpusSplit, list[SourceDocument]]:
    """One document for each split, then each document to the split that lies furthest below its share of the bytes."""
    if len(documents) < len(shares):
        raise CorpusError(
            f"{len(documents)} documents are too few: short stage, long stage and held-out set need one each"
            " (--documents file makes most of a folder, more --max-bytes takes more of it)"
        )
    splits: dict[CorpusSplit, list[SourceDocument]] = {split: [] for split in shares}
    have = dict.fromkeys(shares, 0)
    total = 0
    for document in documents:
        total += document.n_bytes
        empty = [split for split in reversed(splits) if not splits[split]]
        split = empty[0] if empty else max(shares, key=lambda split: shares[split] * total - have[split])
        splits[split].append(document)
        have[split] += document.n_bytes
    return splits


def _write(
    folder: Path,
    training: _Training,
    held_out: HeldOutSource | None,
    tokenizer: Tokenizer,
    end_of_text_token: int,
    report: Report,
) -> Manifest:
    tokenizer.save(str(folder / "tokenizer.json"))
    dtype = token_dtype(tokenizer.get_vocab_size())
    splits = training.splits
    documents = _answered(held_out.source.documents()) if held_out else splits["held_out"]
    total = sum(document.n_bytes for document in itertools.chain(documents, *(splits[split] for split in _TRAINED)))
    done = 0
    entries: dict[CorpusSplit, list[DocumentEntry]] = {"short": [], "long": [], "held_out": []}
    counts, answers = dict.fromkeys(entries, 0), dict.fromkeys(_TRAINED, 0)
    kept_apart: dict[bytes, str] = {}
    with (
        (folder / "held_out.bin").open("wb") as out,
        (folder / "held_out_spans.bin").open("wb") as spans,
        (folder / "held_out.txt").open("wb") as text,
    ):
        for document in held_out_documents(documents, tokenizer, held_out):
            entries["held_out"].append(document.entry("held_out"))
            counts["held_out"] += len(document.ids)
            kept_apart[document.digest] = document.id
            out.write(document.ids.astype(dtype).tobytes())
            spans.write(np.asarray(document.spans, dtype="<i4").tobytes())
            text.write(document.text.encode())
            done += document.n_bytes
            report("tokenizing", done, total)
    if held_out is not None and len(entries["held_out"]) < (held_out.first or 1):
        raise CorpusError(
            f"{len(entries['held_out'])} held-out documents have at least {held_out.min_tokens} tokens:"
            f" {held_out.first or 1} or more are needed"
        )
    for split in _TRAINED:
        with ExitStack() as files:
            out = files.enter_context((folder / f"{split}.bin").open("wb"))
            marks = None
            if training.rows.turns:
                marks = AnswerWriter(files.enter_context((folder / answers_file(split)).open("wb")))
            for document in training_documents(splits[split], tokenizer):
                if held_out is not None and document.digest in kept_apart:
                    raise CorpusError(
                        f"training document {document.id} is held-out document {kept_apart[document.digest]} as well:"
                        " take it out of one of the sources"
                    )
                entries[split].append(document.entry(split))
                counts[split] += len(document.ids) + 1
                out.write(np.append(document.ids, end_of_text_token).astype(dtype).tobytes())
                if marks is not None and document.answers is not None:
                    marks.add(np.append(document.answers, document.answers[-1]))
                done += document.n_bytes
                report("tokenizing", done, total)
            if marks is not None:
                marks.finish()
                answers[split] = marks.answers
    for name, count in counts.items():
        if not count and splits.get(name) != []:
            raise CorpusError(f"the {name} split came out empty")
    manifest = Manifest(
        format=FORMAT,
        source=training.label,
        tokenizer=tokenizer_hash(tokenizer),
        vocab_size=tokenizer.get_vocab_size(),
        end_of_text_id=end_of_text_token,
        short_tokens=counts["short"],
        long_tokens=counts["long"],
        held_out_tokens=counts["held_out"],
        documents=tuple(itertools.chain(*entries.values())),
        files=tuple(
            FileEntry(name=file.name, size_bytes=file.stat().st_size, sha256=file_sha256(file))
            for file in sorted(folder.iterdir())
        ),
        held_out_origin=held_out.origin if held_out else None,
        answers=_answers_origin(training, answers) if training.rows.turns else None,
    )
    fields = dataclasses.asdict(manifest)
    for added in ("held_out_origin", "answers"):  # after the first corpora were named
        if fields[added] is None:
            del fields[added]
    (folder / "manifest.json").write_text(json.dumps(fields, indent=1) + "\n")
    return manifest


def _answers_origin(training: _Training, answers: dict[Split, int]) -> AnswersOrigin:
    chat = JOINED_CHAT if training.rows.prompt is not None else training.rows.chat
    return AnswersOrigin(
        chat=chat.name,
        template=chat.digest,
        short_tokens=answers["short"],
        long_tokens=answers["long"],
        left_out=training.left_out,
    )


def _settle(building: Path, home: Path) -> None:
    """Renames into place; a corpus that is there already has the same content, unless somebody damaged it."""
    try:
        building.rename(home)
    except OSError:
        open_corpus(home.parent.parent, home.name, verify_digests=True)


def _point(pointer: Path, corpus: str) -> None:
    pointer.parent.mkdir(parents=True, exist_ok=True)
    temporary = pointer.with_name(f".{pointer.name}-{uuid.uuid4().hex}")
    temporary.write_text(corpus + "\n")
    os.replace(temporary, pointer)
