"""Documents as tokens: of text with the characters of each token, of turns with the marks of their answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from workers.answers import MarkedText, answer_tokens
from workers.conversations import Exchange
from workers.corpus import CorpusSplit, DocumentEntry
from workers.corpus_rows import SourceDocument
from workers.corpus_sources import HeldOutSource
from workers.corpus_tokenizer import load_tokenizer
from workers.errors import CorpusError

_BATCH_BYTES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDocument:
    """A tokenized document. `text` is empty where a training document came as ids; only held-out ones have `spans`, and
    only exchanges that are trained on `answers`: which tokens are some."""

    id: str
    n_bytes: int
    digest: bytes
    ids: npt.NDArray[np.int64]
    text: str
    spans: npt.NDArray[np.int32] | None = None
    answers: npt.NDArray[np.bool_] | None = None

    def entry(self, split: CorpusSplit) -> DocumentEntry:
        return DocumentEntry(id=self.id, split=split, tokens=len(self.ids), characters=len(self.text))


def training_documents(documents: Sequence[SourceDocument], tokenizer: Tokenizer) -> Iterator[EncodedDocument]:
    """Token ids are taken as they are, text is tokenized; a batch of documents is in memory at a time.

    Raises:
        CorpusError: if ids are none of the tokenizer's, or turns cannot be written or keep no token of an answer.
    """
    for batch in _batches(documents):
        contents = [_written(document) for document in batch]
        texts = [content for content in contents if isinstance(content, str)]
        marked = [content.text for content in contents if isinstance(content, MarkedText)]
        encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        with_spans = iter(tokenizer.encode_batch(marked, add_special_tokens=False))
        for document, content in zip(batch, contents, strict=True):
            answers = None
            if isinstance(content, MarkedText):
                encoding, text = next(with_spans), content.text
                ids = np.asarray(encoding.ids, dtype=np.int64)
                answers = answer_tokens(np.asarray(encoding.offsets).reshape(-1, 2), content.answers)
                if not answers.any():
                    raise CorpusError(f"{document.id}: no token is left of its answers, as they were written")
            elif isinstance(content, str):
                ids, text = np.asarray(next(encodings).ids, dtype=np.int64), content
            else:
                ids, text = _checked(content, tokenizer, document), ""
            yield EncodedDocument(
                id=document.id, n_bytes=document.n_bytes, digest=_digest(content), ids=ids, text=text, answers=answers
            )


def held_out_documents(
    documents: Sequence[SourceDocument], tokenizer: Tokenizer, selection: HeldOutSource | None
) -> Iterator[EncodedDocument]:
    """All documents, or those of a selection, with the characters that each token covers."""
    least, most, first = (selection.min_tokens, selection.max_tokens, selection.first) if selection else (0, None, None)
    maker = load_tokenizer(selection.ids_tokenizer) if selection and selection.ids_tokenizer else tokenizer
    taken = 0
    for batch in _batches(documents):
        contents = [_plain(document) for document in batch]
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
            yield EncodedDocument(
                id=document.id,
                n_bytes=document.n_bytes,
                digest=_digest(content),
                ids=np.asarray(encoding.ids[kept], dtype=np.int64),
                text=text[: spans[-1, 1]] if cut else text,
                spans=spans,
            )


def _written(document: SourceDocument) -> str | npt.NDArray[np.int64] | MarkedText:
    content = document.read()
    return content.written(document.id) if isinstance(content, Exchange) else content


def _plain(document: SourceDocument) -> str | npt.NDArray[np.int64]:
    """Of an exchange its text: it is measured like any other."""
    content = _written(document)
    return content.text if isinstance(content, MarkedText) else content


def _decoded(ids: npt.NDArray[np.int64], tokenizer: Tokenizer, document: SourceDocument, most: int | None) -> str:
    text: str = tokenizer.decode(_checked(ids, tokenizer, document)[:most].tolist(), skip_special_tokens=True)
    return text


def _checked(ids: npt.NDArray[np.int64], tokenizer: Tokenizer, document: SourceDocument) -> npt.NDArray[np.int64]:
    size = tokenizer.get_vocab_size()
    outside = ids[(ids < 0) | (ids >= size)]
    if len(outside):
        raise CorpusError(f"{document.id}: token {outside[0]} is outside of the tokenizer's vocabulary of {size}")
    return ids


def _digest(content: str | npt.NDArray[np.int64] | MarkedText) -> bytes:
    text = content.text if isinstance(content, MarkedText) else content
    return hashlib.sha256(text.encode() if isinstance(text, str) else text.tobytes()).digest()


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
