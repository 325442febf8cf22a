"""Reference models: what selects key tokens. One interface, two implementations, each loaded only when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workers.corpus import Corpus, open_corpus
from workers.documents import Window
from workers.errors import ReferenceModelError
from workers.key_tokens import Spans
from workers.progress import Report, unreported
from workers.reference_digest import reference_digest
from workers.spec import Chunking, Evaluator, Reference, content_hash

#: Where a reference's tokenizer names a beginning-of-text token, exactly one stands before the window and before every
#: chunk; where it names none, the first token goes unscored. Evaluated models never see one.
BEGINNING = "one, if the tokenizer names it, before every window and chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceLosses:
    """NLL (nats) of one window's tokens, float32: with full and with local context; NaN where there is none.

    `spans` are the characters of the window's text that each token covers, or None if the tokens are the corpus's own.
    """

    full: npt.NDArray[np.float32]
    local: npt.NDArray[np.float32]
    spans: Spans | None = None


class ReferenceScorer(Protocol):
    """A model that scores windows under full and under local context."""

    def score(
        self, windows: Sequence[Window], chunking: Chunking, *, report: Report = unreported
    ) -> list[ReferenceLosses]: ...


def open_reference(reference: Reference, *, corpus: Corpus, store: Path) -> ReferenceScorer:
    """Makes the scorer ready.

    Raises:
        ReferenceModelError: if its files are missing, or are not those of `reference.digest`.
    """
    if reference.kind == "copy":
        from workers.reference_copy import CopyReference

        return CopyReference(_counted(reference, corpus, store))
    from workers.reference_huggingface import HuggingFaceReference

    folder = _folder(reference)
    found = reference_digest(folder)
    if reference.digest not in (None, found):
        raise ReferenceModelError(f"{folder} has digest {found}, the evaluator names {reference.digest}")
    return HuggingFaceReference(folder, corpus=corpus)


def losses_identity(evaluator: Evaluator, corpus: Corpus) -> str:
    """Names everything that decides both losses of every token. A reference's path is not part of it, its content is.

    Raises:
        ReferenceModelError: if the evaluator names no digest and the folder cannot be read.
    """
    reference = evaluator.reference
    digest = reference.digest
    if digest is None:
        digest = corpus.hash if reference.kind == "copy" else reference_digest(_folder(reference))
    return content_hash(
        {
            "reference": [reference.kind, digest],
            "documents": evaluator.documents,
            "tokenizer": corpus.manifest.tokenizer,
            "chunking": evaluator.chunking,
            "beginning": BEGINNING,
            "numerics_version": evaluator.numerics_version,
        }
    )


def _counted(reference: Reference, corpus: Corpus, store: Path) -> Corpus:
    """The corpus whose training tokens the copy reference counts: the evaluated one, unless another is named."""
    if reference.digest in (None, corpus.hash):
        return corpus
    other = open_corpus(store, str(reference.digest))
    if other.manifest.tokenizer != corpus.manifest.tokenizer:
        raise ReferenceModelError(f"corpora {other.hash} and {corpus.hash} have different tokenizers")
    return other


def _folder(reference: Reference) -> Path:
    if reference.path is None:
        raise ReferenceModelError("a huggingface reference needs the path of its folder")
    return Path(reference.path)
