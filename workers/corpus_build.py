"""Building a corpus: which documents go into which split, tokenized and written into the store under their hash."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from workers import mirror
from workers.corpus import (
    FORMAT,
    NAME,
    CorpusSplit,
    DocumentEntry,
    FileEntry,
    HeldOutOrigin,
    Manifest,
    file_sha256,
    open_corpus,
    token_dtype,
    tokenizer_hash,
)
from workers.corpus_rows import Content, SourceDocument
from workers.corpus_sources import CorpusSource
from workers.corpus_tokenizer import END_OF_TEXT, Report, end_of_text_id, load_tokenizer, train_tokenizer
from workers.errors import CorpusError
from workers.spec import Split

_BATCH_BYTES = 4_000_000
#: A document above this share of `max_bytes` is left out: it would be most of a split.
_LARGEST_SHARE = 1 / 20
#: A name is a file in the store, and gets a suffix while that is written.
_LONGEST_NAME = 200
_TRAINED: tuple[Split, ...] = ("short", "long")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSource:
    """Held-out documents with a source of their own, taken in its order: the first `first` (None: all) of those that
    have at least `min_tokens` tokens, each cut after `max_tokens`.

    Tokens are the corpus's own, but where rows hold token ids: those are counted and cut as they are, turned into text
    by the tokenizer that made them (`ids_tokenizer`, else the corpus's), and the text is tokenized like any other.
    """

    source: CorpusSource
    min_tokens: int = 1
    max_tokens: int | None = None
    first: int | None = None
    ids_tokenizer: Path | None = None

    @property
    def origin(self) -> HeldOutOrigin:
        return HeldOutOrigin(
            source=self.source.label, min_tokens=self.min_tokens, max_tokens=self.max_tokens, first=self.first
        )


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
    row group stay together, in the order of the hash of its name.

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
        CorpusError: if a source is empty or unreadable, has too few documents, or has a document in common with
            `held_out`.
    """
    if not NAME.fullmatch(name):
        raise CorpusError(f'corpus name "{name}": use letters, digits, ".", "_" and "-"')
    if len(name) > _LONGEST_NAME:
        raise CorpusError(f"the corpus name has {len(name)} characters: use at most {_LONGEST_NAME}")
    report = report or (lambda stage, done, total: None)
    splits = _training_splits(source, max_bytes, long_share, None if held_out else held_out_share)
    if tokenizer_file is not None:
        tokenizer = load_tokenizer(tokenizer_file)
    elif source is not None:
        tokenizer = train_tokenizer([*splits["short"], *splits["long"]], vocab_size, report)
        end_of_text = END_OF_TEXT
    else:
        raise CorpusError("a corpus without training documents needs the tokenizer of the models it will measure")
    end_of_text_token = end_of_text_id(tokenizer, end_of_text)

    corpora = store / "corpora"
    building = corpora / f".building-{uuid.uuid4().hex}"
    building.mkdir(parents=True)
    try:
        label = "nothing" if source is None else source.label
        manifest = _write(building, label, splits, held_out, tokenizer, end_of_text_token, report)
        _settle(building, corpora / manifest.hash)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    mirror.publish(store, f"corpora/{manifest.hash}")
    _point(corpora / "names" / name, manifest.hash)
    mirror.publish(store, f"corpora/names/{name}")
    return manifest


def _training_splits(
    source: CorpusSource | None, max_bytes: int | None, long_share: float, held_out_share: float | None
) -> dict[CorpusSplit, list[SourceDocument]]:
    """Documents of each split, without "held_out" where those come from elsewhere."""
    if source is None:
        return {"short": [], "long": []}
    shares: dict[CorpusSplit, float] = {"short": 1 - long_share - (held_out_share or 0.0), "long": long_share}
    if held_out_share is not None:
        shares["held_out"] = held_out_share
    if not all(0 < share < 1 for share in shares.values()):
        raise CorpusError("long_share and held_out_share must be positive and leave something to the short stage")
    return _split(_choose(source.documents(), max_bytes), shares)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    """A tokenized document. `text` is empty where a training document came as ids; only held-out ones have `spans`."""

    id: str
    n_bytes: int
    digest: bytes
    ids: npt.NDArray[np.int64]
    text: str
    spans: npt.NDArray[np.int32] | None = None

    def entry(self, split: CorpusSplit) -> DocumentEntry:
        return DocumentEntry(id=self.id, split=split, tokens=len(self.ids), characters=len(self.text))


def _write(
    folder: Path,
    source: str,
    splits: dict[CorpusSplit, list[SourceDocument]],
    held_out: HeldOutSource | None,
    tokenizer: Tokenizer,
    end_of_text_token: int,
    report: Report,
) -> Manifest:
    tokenizer.save(str(folder / "tokenizer.json"))
    dtype = token_dtype(tokenizer.get_vocab_size())
    documents = held_out.source.documents() if held_out else splits["held_out"]
    total = sum(document.n_bytes for document in itertools.chain(documents, *(splits[split] for split in _TRAINED)))
    done = 0
    entries: dict[CorpusSplit, list[DocumentEntry]] = {"short": [], "long": [], "held_out": []}
    counts = dict.fromkeys(entries, 0)
    kept_apart: dict[bytes, str] = {}
    with (
        (folder / "held_out.bin").open("wb") as out,
        (folder / "held_out_spans.bin").open("wb") as spans,
        (folder / "held_out.txt").open("wb") as text,
    ):
        for document in _held_out_documents(documents, tokenizer, held_out):
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
        with (folder / f"{split}.bin").open("wb") as out:
            for document in _training_documents(splits[split], tokenizer):
                if held_out is not None and document.digest in kept_apart:
                    raise CorpusError(
                        f"training document {document.id} is held-out document {kept_apart[document.digest]} as well:"
                        " take it out of one of the sources"
                    )
                entries[split].append(document.entry(split))
                counts[split] += len(document.ids) + 1
                out.write(np.append(document.ids, end_of_text_token).astype(dtype).tobytes())
                done += document.n_bytes
                report("tokenizing", done, total)
    for name, count in counts.items():
        if not count and splits.get(name) != []:
            raise CorpusError(f"the {name} split came out empty")
    manifest = Manifest(
        format=FORMAT,
        source=source,
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
    )
    fields = dataclasses.asdict(manifest)
    if manifest.held_out_origin is None:
        del fields["held_out_origin"]
    (folder / "manifest.json").write_text(json.dumps(fields, indent=1) + "\n")
    return manifest


def _training_documents(documents: Sequence[SourceDocument], tokenizer: Tokenizer) -> Iterator[_Encoded]:
    """Token ids are taken as they are, text is tokenized; a batch of documents is in memory at a time."""
    for batch in _batches(documents):
        contents = [document.read() for document in batch]
        texts = [content for content in contents if isinstance(content, str)]
        encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for document, content in zip(batch, contents, strict=True):
            if isinstance(content, str):
                ids, text = np.asarray(next(encodings).ids, dtype=np.int64), content
            else:
                ids, text = _checked(content, tokenizer, document), ""
            yield _Encoded(id=document.id, n_bytes=document.n_bytes, digest=_digest(content), ids=ids, text=text)


def _held_out_documents(
    documents: Sequence[SourceDocument], tokenizer: Tokenizer, selection: HeldOutSource | None
) -> Iterator[_Encoded]:
    """All documents, or those of a selection, with the characters that each token covers."""
    least, most, first = (selection.min_tokens, selection.max_tokens, selection.first) if selection else (0, None, None)
    maker = load_tokenizer(selection.ids_tokenizer) if selection and selection.ids_tokenizer else tokenizer
    taken = 0
    for batch in _batches(documents):
        contents = [document.read() for document in batch]
        texts = [
            content if isinstance(content, str) else _decoded(content, maker, document, most)
            for document, content in zip(batch, contents, strict=True)
        ]
        # Spans cost half of the encoding time, and only held-out documents need them.
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        for document, content, text, encoding in zip(batch, contents, texts, encodings, strict=True):
            if taken == first:
                return
            of_text = isinstance(content, str)
            if len(encoding.ids if of_text else content) < least:
                continue
            kept = slice(most if of_text else None)
            spans = np.asarray(encoding.offsets[kept], dtype=np.int32).reshape(-1, 2)
            cut = of_text and len(spans) < len(encoding.ids)
            taken += 1
            yield _Encoded(
                id=document.id,
                n_bytes=document.n_bytes,
                digest=_digest(content),
                ids=np.asarray(encoding.ids[kept], dtype=np.int64),
                text=text[: spans[-1, 1]] if cut else text,
                spans=spans,
            )


def _decoded(ids: npt.NDArray[np.int64], tokenizer: Tokenizer, document: SourceDocument, most: int | None) -> str:
    text: str = tokenizer.decode(_checked(ids, tokenizer, document)[:most].tolist(), skip_special_tokens=True)
    return text


def _checked(ids: npt.NDArray[np.int64], tokenizer: Tokenizer, document: SourceDocument) -> npt.NDArray[np.int64]:
    size = tokenizer.get_vocab_size()
    outside = ids[(ids < 0) | (ids >= size)]
    if len(outside):
        raise CorpusError(f"{document.id}: token {outside[0]} is outside of the tokenizer's vocabulary of {size}")
    return ids


def _digest(content: Content) -> bytes:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content.tobytes()).digest()


def _batches(documents: Sequence[SourceDocument]) -> Iterator[list[SourceDocument]]:
    batch: list[SourceDocument] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.n_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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
