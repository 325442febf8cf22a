"""Tokenized corpora: built once, named by the hash of their content, read as memory-mapped arrays.

A corpus lies in `<store>/corpora/<hash>/`:

    manifest.json    source, tokenizer hash, counts per split, documents, size and sha256 of every other file
    tokenizer.json   the tokenizer, as `tokenizers` writes it
    short.bin        tokens of the short stage's documents, each followed by the end-of-text token
    long.bin         the same for the long stage
    held_out.bin     tokens of the held-out documents, without separators
    held_out_spans.bin   int32 pairs: characters of its document that each held-out token covers
    held_out.txt     text of the held-out documents, UTF-8, one after another

`<store>/corpora/names/<name>` holds the hash that a name stands for. Nothing in a corpus depends on when, where or
under which name it was built, so two machines with the same text arrive at the same hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from workers.corpus_sources import CorpusSource, SourceDocument
from workers.errors import CorpusError
from workers.spec import Split, content_hash

Tokens = npt.NDArray[np.uint16 | np.uint32]
CorpusSplit = Literal["short", "long", "held_out"]
Report = Callable[[str, int, int], None]

FORMAT = 1
END_OF_TEXT = "<|endoftext|>"
#: Tried in this order when a given tokenizer's end-of-text token is not named.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
_SPLITS: tuple[CorpusSplit, ...] = get_args(CorpusSplit)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BATCH_BYTES = 4_000_000
#: A document above this share of `max_bytes` is left out: it would be most of a split.
_LARGEST_SHARE = 1 / 20
#: Text that decides a byte-level vocabulary, per entry of it; more changes little and takes long.
_TOKENIZER_BYTES_PER_ENTRY = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentEntry:
    """One document of a manifest; `tokens` excludes the separator that follows it in a training split."""

    id: str
    split: CorpusSplit
    tokens: int
    characters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a corpus holds. Token counts of the training splits include separators."""

    format: int
    source: str
    tokenizer: str
    vocab_size: int
    end_of_text_id: int
    short_tokens: int
    long_tokens: int
    held_out_tokens: int
    documents: tuple[DocumentEntry, ...]
    files: tuple[FileEntry, ...]

    @property
    def hash(self) -> str:
        return content_hash(self)

    @property
    def token_dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def of(self, split: CorpusSplit) -> tuple[DocumentEntry, ...]:
        return tuple(document for document in self.documents if document.split == split)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutDocument:
    """A document never trained on. `spans[i]` are the characters of `text` that token i covers, half open."""

    id: str
    tokens: Tokens
    spans: npt.NDArray[np.int32]
    text: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """An opened corpus; arrays are memory-mapped and read-only."""

    hash: str
    path: Path
    manifest: Manifest

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    def tokens(self, split: Split) -> Tokens:
        """All training tokens of a split, shape (n,), documents separated by the end-of-text token."""
        return np.memmap(self.path / f"{split}.bin", dtype=self.manifest.token_dtype, mode="r")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.path / "tokenizer.json"))

    @cached_property
    def held_out(self) -> tuple[HeldOutDocument, ...]:
        tokens = np.memmap(self.path / "held_out.bin", dtype=self.manifest.token_dtype, mode="r")
        spans = np.memmap(self.path / "held_out_spans.bin", dtype="<i4", mode="r").reshape(-1, 2)
        text = (self.path / "held_out.txt").read_bytes().decode("utf-8")
        documents, at_token, at_character = [], 0, 0
        for entry in self.manifest.of("held_out"):
            next_token, next_character = at_token + entry.tokens, at_character + entry.characters
            documents.append(
                HeldOutDocument(
                    id=entry.id,
                    tokens=tokens[at_token:next_token],
                    spans=spans[at_token:next_token],
                    text=text[at_character:next_character],
                )
            )
            at_token, at_character = next_token, next_character
        return tuple(documents)


def build_corpus(
    source: CorpusSource,
    *,
    store: Path,
    name: str,
    vocab_size: int = 512,
    tokenizer_file: Path | None = None,
    end_of_text: str | None = None,
    max_bytes: int | None = None,
    long_share: float = 0.15,
    held_out_share: float = 0.1,
    report: Report | None = None,
) -> Manifest:
    """Tokenizes `source` into the store and lets `name` stand for the result.

    Documents are taken in the order of the hash of their ids while they fit into `max_bytes` of text; one that is
    larger than a twentieth of that is left out. A document belongs to one split as a whole.

    Args:
        vocab_size: Size of the byte-level BPE that is trained on the training documents.
        tokenizer_file: An existing `tokenizer.json` to use instead.
        end_of_text: Its separator token, if it is none of the usual names.
        long_share: Share of the bytes for the long stage; the short stage gets what the other two leave.
        held_out_share: Share of the bytes that no stage trains on.
        report: Called with a stage's name, what is done and what there is to do, in bytes.

    Raises:
        CorpusError: if the source is empty or unreadable, or has too few documents for three splits.
    """
    if not _NAME.fullmatch(name):
        raise CorpusError(f'corpus name "{name}": use letters, digits, ".", "_" and "-"')
    if not (0 < long_share < 1 and 0 < held_out_share < 1 and long_share + held_out_share < 1):
        raise CorpusError("long_share and held_out_share must be positive and leave something to the short stage")
    report = report or (lambda stage, done, total: None)
    chosen = _choose(source.documents(), max_bytes)
    splits = _split(chosen, {"short": 1 - long_share - held_out_share, "long": long_share, "held_out": held_out_share})
    if tokenizer_file is None:
        tokenizer = _train_tokenizer([*splits["short"], *splits["long"]], vocab_size, report)
        end_of_text = END_OF_TEXT
    else:
        tokenizer = _load_tokenizer(tokenizer_file)
    end_of_text_id = _end_of_text_id(tokenizer, end_of_text)

    corpora = store / "corpora"
    building = corpora / f".building-{uuid.uuid4().hex}"
    building.mkdir(parents=True)
    try:
        manifest = _write(building, source.label, splits, tokenizer, end_of_text_id, report)
        _settle(building, corpora / manifest.hash)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    _point(corpora / "names" / name, manifest.hash)
    return manifest


def open_corpus(store: Path, corpus: str, *, verify_digests: bool = False) -> Corpus:
    """Opens the corpus with this hash after checking its manifest and the sizes of its files.

    Args:
        verify_digests: Also read every file and compare its sha256.

    Raises:
        CorpusError: if it is missing, or not what its hash says.
    """
    path = store / "corpora" / corpus
    try:
        manifest = _parse_manifest((path / "manifest.json").read_text())
    except FileNotFoundError:
        raise CorpusError(f"no corpus {corpus} in {store}: build it with `longlaw data build`") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{path / 'manifest.json'} is unreadable: {error}") from error
    if manifest.hash != corpus:
        raise CorpusError(f"{path}: the manifest has hash {manifest.hash}; it was changed after it was built")
    for entry in manifest.files:
        file = path / entry.name
        if not file.is_file() or file.stat().st_size != entry.size_bytes:
            raise CorpusError(f"{file} is missing or has the wrong size: build the corpus again")
        if verify_digests and _sha256(file) != entry.sha256:
            raise CorpusError(f"{file} has the wrong digest: build the corpus again")
    return Corpus(hash=corpus, path=path, manifest=manifest)


def find_corpus(store: Path, name: str) -> str:
    """The hash that a corpus's name stands for.

    Raises:
        CorpusError: if no corpus has that name; the message lists those that exist.
    """
    names = corpus_names(store)
    if name not in names:
        raise CorpusError(f'no corpus "{name}" in {store}; there is: {", ".join(sorted(names)) or "none"}')
    return names[name]


def corpus_names(store: Path) -> dict[str, str]:
    """All names and the hashes they stand for."""
    folder = store / "corpora" / "names"
    if not folder.is_dir():
        return {}
    return {path.name: path.read_text().strip() for path in sorted(folder.iterdir()) if _NAME.fullmatch(path.name)}


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Names a tokenizer by its content, whatever the layout of the file it came from."""
    return content_hash(json.loads(tokenizer.to_str()))


def _choose(documents: list[SourceDocument], max_bytes: int | None) -> list[SourceDocument]:
    ordered = sorted(documents, key=lambda document: hashlib.sha256(document.id.encode()).digest())
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
            " (one per file gives more than one per directory; a higher max_bytes takes more)"
        )
    splits: dict[CorpusSplit, list[SourceDocument]] = {split: [] for split in shares}
    have = dict.fromkeys(shares, 0)
    total = 0
    for document in documents:
        total += document.n_bytes
        empty = [split for split in reversed(_SPLITS) if not splits[split]]
        split = empty[0] if empty else max(shares, key=lambda split: shares[split] * total - have[split])
        splits[split].append(document)
        have[split] += document.n_bytes
    return splits


def _train_tokenizer(documents: Sequence[SourceDocument], vocab_size: int, report: Report) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise CorpusError(
            f"vocab_size {vocab_size} is too small: bytes and the separator alone are {len(alphabet) + 1}"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )

    def texts() -> Iterator[str]:
        total = min(vocab_size * _TOKENIZER_BYTES_PER_ENTRY, sum(document.n_bytes for document in documents))
        done = 0
        for document in documents:
            yield document.read()
            done += document.n_bytes
            report("training the tokenizer", min(done, total), total)
            if done >= total:
                return

    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise CorpusError(f"{path} is not a tokenizer.json: {error}") from error


def _end_of_text_id(tokenizer: Tokenizer, name: str | None) -> int:
    for candidate in (name,) if name else _END_OF_TEXT_NAMES:
        found: int | None = tokenizer.token_to_id(candidate)
        if found is not None:
            return found
    raise CorpusError("the tokenizer has no end-of-text token of that name: give end_of_text")


def _write(
    folder: Path,
    source: str,
    splits: dict[CorpusSplit, list[SourceDocument]],
    tokenizer: Tokenizer,
    end_of_text_id: int,
    report: Report,
) -> Manifest:
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    total = sum(document.n_bytes for documents in splits.values() for document in documents)
    entries: list[DocumentEntry] = []
    counts = dict.fromkeys(_SPLITS, 0)
    done = 0
    with (folder / "held_out_spans.bin").open("wb") as spans, (folder / "held_out.txt").open("wb") as held_out_text:
        for split in _SPLITS:
            # Spans cost half of the encoding time, and only held-out documents need them.
            encode = tokenizer.encode_batch if split == "held_out" else tokenizer.encode_batch_fast
            with (folder / f"{split}.bin").open("wb") as out:
                for batch in _batches(splits[split]):
                    texts = [document.read() for document in batch]
                    encodings = encode(texts, add_special_tokens=False)
                    for document, text, encoding in zip(batch, texts, encodings, strict=True):
                        ids = np.asarray(encoding.ids, dtype=dtype)
                        entries.append(
                            DocumentEntry(id=document.id, split=split, tokens=len(ids), characters=len(text))
                        )
                        if split == "held_out":
                            spans.write(np.asarray(encoding.offsets, dtype="<i4").tobytes())
                            held_out_text.write(text.encode())
                        else:
                            ids = np.append(ids, dtype.type(end_of_text_id))
                        out.write(ids.tobytes())
                        counts[split] += len(ids)
                        done += document.n_bytes
                        report("tokenizing", done, total)
    for split, count in counts.items():
        if not count:
            raise CorpusError(f"the {split} split came out empty")
    manifest = Manifest(
        format=FORMAT,
        source=source,
        tokenizer=tokenizer_hash(tokenizer),
        vocab_size=vocab_size,
        end_of_text_id=end_of_text_id,
        short_tokens=counts["short"],
        long_tokens=counts["long"],
        held_out_tokens=counts["held_out"],
        documents=tuple(entries),
        files=tuple(
            FileEntry(name=file.name, size_bytes=file.stat().st_size, sha256=_sha256(file))
            for file in sorted(folder.iterdir())
        ),
    )
    (folder / "manifest.json").write_text(json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")
    return manifest


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


def _parse_manifest(text: str) -> Manifest:
    fields = json.loads(text)
    documents = tuple(DocumentEntry(**entry) for entry in fields.pop("documents"))
    files = tuple(FileEntry(**entry) for entry in fields.pop("files"))
    return Manifest(documents=documents, files=files, **fields)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
