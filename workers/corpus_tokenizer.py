"""A corpus's tokenizer: trained on its text, or an existing one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from workers.conversations import Exchange
from workers.corpus_rows import SourceDocument
from workers.errors import CorpusError

Report = Callable[[str, int, int], None]

END_OF_TEXT = "<|endoftext|>"
#: Tried in this order when a given tokenizer's end-of-text token is not named.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
#: Text that decides a byte-level vocabulary, per entry of it; more changes little and takes long.
_BYTES_PER_ENTRY = 2_000


def train_tokenizer(documents: Sequence[SourceDocument], vocab_size: int, report: Report) -> Tokenizer:
    """A byte-level BPE of the first documents' text.

    Raises:
        CorpusError: if the vocabulary has no room for all bytes, or a document holds token ids.
    """
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
        total = min(vocab_size * _BYTES_PER_ENTRY, sum(document.n_bytes for document in documents))
        done = 0
        for document in documents:
            text = document.read()
            if isinstance(text, Exchange):
                text = text.written(document.id).text
            if not isinstance(text, str):
                raise CorpusError(f"{document.id} holds token ids: give the tokenizer that made them")
            yield text
            done += document.n_bytes
            report("training the tokenizer", min(done, total), total)
            if done >= total:
                return

    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises CorpusError if the file is no `tokenizer.json`."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise CorpusError(f"{path} is not a tokenizer.json: {error}") from error


def end_of_text_id(tokenizer: Tokenizer, name: str | None) -> int:
    """The token that follows every training document: `name`, or the first of the usual names that exists."""
    for candidate in (name,) if name else _END_OF_TEXT_NAMES:
        found: int | None = tokenizer.token_to_id(candidate)
        if found is not None:
            return found
    raise CorpusError(
        f'the tokenizer has no token "{name}"'
        if name
        else "the tokenizer's end-of-text token has no usual name: give it (--end-of-text)"
    )
