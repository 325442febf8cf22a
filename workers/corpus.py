"""Tokenized corpora: built once, named by the hash of their content, read as memory-mapped arrays.

A corpus lies in `<store>/corpora/<hash>/`:

    manifest.json    source, tokenizer hash, counts per split, documents, size and sha256 of every other file
    tokenizer.json   the tokenizer, as `tokenizers` writes it
    short.bin        tokens of the short stage's documents, each followed by the end-of-text token
    long.bin         the same for the long stage
    short_answers.bin, long_answers.bin   which of those tokens are answers, a bit each; where rows hold answers alone
    held_out.bin     tokens of the held-out documents, without separators
    held_out_spans.bin   int32 pairs: characters of its document that each held-out token covers
    held_out.txt     text of the held-out documents, UTF-8, one after another

`<store>/corpora/names/<name>` holds the hash that a name stands for. Nothing in a corpus depends on when, where or
under which name it was built, so two machines with the same text arrive at the same hash.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from workers import mirror
from workers.answers import AnswerMarks
from workers.errors import CorpusError
from workers.spec import Split, content_hash, optional

Tokens = npt.NDArray[np.uint16 | np.uint32]
CorpusSplit = Literal["short", "long", "held_out"]

FORMAT = 1
#: What a corpus may be called.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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
class HeldOutOrigin:
    """How held-out documents were chosen that have a source of their own: in its order, the first `first` of those with
    at least `min_tokens` tokens, each cut after `max_tokens`."""

    source: str
    min_tokens: int
    max_tokens: int | None
    first: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersOrigin:
    """Which training tokens are answers: their numbers, with separators that end an answer.

    `chat` is how rows were written, `joined`, `plain` or `template`; `template` the sha256 of a chat template's text.
    `left_out` are the rows that had no answer.
    """

    chat: str
    template: str | None
    short_tokens: int
    long_tokens: int
    left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a corpus holds. Token counts of the training splits include separators. Without `answers`, every token is
    there to be learned."""

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
    held_out_origin: HeldOutOrigin | None = optional(None)
    answers: AnswersOrigin | None = optional(None)

    @property
    def hash(self) -> str:
        return content_hash(self)

    @property
    def token_dtype(self) -> np.dtype[Any]:
        return token_dtype(self.vocab_size)

    def of(self, split: CorpusSplit) -> tuple[DocumentEntry, ...]:
        return tuple(document for document in self.documents if document.split == split)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The numbers that token files hold."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def answers_file(split: Split) -> str:
    """Where the marks of a split's answers lie."""
    return f"{split}_answers.bin"


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
        """All training tokens of a split, shape (n,), each document followed by the end-of-text token.

        Raises:
            CorpusError: if there are none: the corpus was built to measure with.
        """
        if not self.manifest.of(split):
            raise CorpusError(f"corpus {self.hash} has nothing to train on: it holds held-out documents alone")
        return np.memmap(self.path / f"{split}.bin", dtype=self.manifest.token_dtype, mode="r")

    def answers(self, split: Split) -> AnswerMarks | None:
        """Which of `tokens` are answers; None where all are there to be learned."""
        if self.manifest.answers is None:
            return None
        return AnswerMarks(bits=np.memmap(self.path / answers_file(split), dtype=np.uint8, mode="r"))

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


def open_corpus(store: Path, corpus: str, *, verify_digests: bool = False) -> Corpus:
    """Opens the corpus with this hash after checking its manifest and the sizes of its files.

    Args:
        verify_digests: Also read every file and compare its sha256.

    Raises:
        CorpusError: if it is missing, or not what its hash says.
    """
    path = store / "corpora" / corpus
    mirror.fetch(store, f"corpora/{corpus}")
    try:
        fields = json.loads((path / "manifest.json").read_text())
        found = content_hash(fields)  # of plain values, which is faster with many documents
        manifest = _manifest(fields)
    except FileNotFoundError:
        raise CorpusError(f"no corpus {corpus} in {store}: build it with `longlaw data build`") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{path / 'manifest.json'} is unreadable: {error}") from error
    if found != corpus:
        raise CorpusError(f"{path}: the manifest has hash {found}; it was changed after it was built")
    for entry in manifest.files:
        file = path / entry.name
        if not file.is_file() or file.stat().st_size != entry.size_bytes:
            raise CorpusError(f"{file} is missing or has the wrong size: build the corpus again")
        if verify_digests and file_sha256(file) != entry.sha256:
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
    names = {}
    for name in mirror.names_in(store, "corpora/names"):
        if NAME.fullmatch(name):
            mirror.fetch(store, f"corpora/names/{name}", again=True)
            names[name] = (store / "corpora" / "names" / name).read_text().strip()
    return names


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Names a tokenizer by its content, whatever the layout of the file it came from."""
    return content_hash(json.loads(tokenizer.to_str()))


def _manifest(fields: dict[str, Any]) -> Manifest:
    documents = tuple(DocumentEntry(**entry) for entry in fields.pop("documents"))
    files = tuple(FileEntry(**entry) for entry in fields.pop("files"))
    origin, answers = fields.pop("held_out_origin", None), fields.pop("answers", None)
    return Manifest(
        documents=documents,
        files=files,
        held_out_origin=HeldOutOrigin(**origin) if origin else None,
        answers=AnswersOrigin(**answers) if answers else None,
        **fields,
    )


def file_sha256(path: Path) -> str:
    """The digest that a manifest holds of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
