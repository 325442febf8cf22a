"""Where a corpus's text comes from: documents with a name, a size and a way to read them.

Listing is cheap (names and sizes); text is read only for the documents that the corpus takes.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from workers.corpus import HeldOutOrigin
from workers.corpus_rows import (
    TEXT_ROWS,
    Row,
    RowFields,
    SourceDocument,
    dataset_rows,
    documents_of_rows,
    json_rows,
    parquet_rows,
)
from workers.errors import CorpusError

#: Differs between builds of one torch version (CPU, CUDA); without it they yield the same corpus.
_BUILD_SPECIFIC = "version.py"
DocumentsBy = Literal["file", "directory", "repository"]
_ROWS_OF: dict[str, Callable[[Path, str, RowFields], Iterator[Row]]] = {".jsonl": json_rows, ".parquet": parquet_rows}


class CorpusSource(Protocol):
    """Something that lists documents. `label` is written into the manifest; `rows` says what documents hold."""

    @property
    def label(self) -> str: ...

    @property
    def rows(self) -> RowFields: ...

    def documents(self) -> list[SourceDocument]:
        """All documents, in an order of the source's own.

        Raises:
            CorpusError: if there is none, or one cannot be listed.
        """
        ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSource:
    """The `.py` sources of the installed torch package, one document per directory. torch is not imported."""

    label: str = "torch"
    rows: RowFields = TEXT_ROWS

    def documents(self) -> list[SourceDocument]:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            raise CorpusError("torch is not installed: install longlaw[worker], or build from a folder of text")
        root = Path(spec.submodule_search_locations[0])
        files = [path for path in root.rglob("*.py") if path != root / _BUILD_SPECIFIC]
        return [document for document in _by_directory(files, root=root.parent) if document.n_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource:
    """A folder of UTF-8 text, JSON-lines and Parquet files (hidden ones are left out), or one file of those.

    `documents_by` "file" makes a document of each text file, "directory" of all text files that lie in one directory,
    "repository" of all that lie anywhere below one of the folder's own directories.
    Each row of a `.jsonl` or `.parquet` file is a document by itself, or all rows of a group are; `rows` names the
    fields.
    """

    path: Path
    documents_by: DocumentsBy = "file"
    rows: RowFields = TEXT_ROWS
    label: str = "folder"

    def documents(self) -> list[SourceDocument]:
        if self.path.is_file():
            files, root = [self.path], self.path.parent
        elif self.path.is_dir():
            files, root = sorted(path for path in self.path.rglob("*") if path.is_file()), self.path
            files = [path for path in files if not _hidden(path.relative_to(root))]
        else:
            raise CorpusError(f"{self.path} is not a folder or file")
        for path in files:
            _check_name(path.relative_to(root))
        texts = [path for path in files if path.suffix not in _ROWS_OF]
        if texts and self.rows.turns:
            raise CorpusError(
                f"{texts[0]} is no .jsonl or .parquet file, which alone hold {self.rows.wanted}: take it out"
            )
        if self.documents_by != "file":
            found = _by_directory(texts, root=root, deep=self.documents_by == "repository")
        else:
            found = [_text_document([path], name=path.relative_to(root).as_posix()) for path in texts]
        found = [document for document in found if document.n_bytes]
        found += documents_of_rows(self._rows([path for path in files if path.suffix in _ROWS_OF], root))
        if not found:
            raise CorpusError(
                f"{self.path} holds no {self.rows.wanted}: expected non-empty"
                f" {'' if self.rows.turns else 'text, '}.jsonl or .parquet files"
            )
        return found

    def _rows(self, files: list[Path], root: Path) -> Iterator[Row]:
        for path in files:
            yield from _ROWS_OF[path.suffix](path, path.relative_to(root).as_posix(), self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource:
    """A Hugging Face dataset on disk, as `Dataset.save_to_disk` leaves it: each row, or group of rows, a document."""

    path: Path
    rows: RowFields = TEXT_ROWS
    label: str = "dataset"

    def documents(self) -> list[SourceDocument]:
        found = documents_of_rows(dataset_rows(self.path, self.rows))
        if not found:
            raise CorpusError(f"{self.path} holds no {self.rows.wanted}")
        return found


def source_at(path: Path, *, documents_by: DocumentsBy = "file", rows: RowFields = TEXT_ROWS) -> CorpusSource:
    """The source that lies at `path`: a dataset on disk, else a folder or file."""
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return DatasetSource(path=path, rows=rows)
    return FolderSource(path=path, documents_by=documents_by, rows=rows)


def _check_name(relative: Path) -> None:
    """Names are ids of documents, which are hashed and written as UTF-8."""
    try:
        str(relative).encode()
    except UnicodeEncodeError:
        raise CorpusError(f"the file name {str(relative)!a} is not UTF-8: rename it") from None


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _by_directory(files: list[Path], *, root: Path, deep: bool = False) -> list[SourceDocument]:
    """One document for each directory that holds files, or, if `deep`, for each right below `root`."""
    directories: dict[Path, list[Path]] = defaultdict(list)
    for path in files:
        folder = path.parent.relative_to(root)
        directories[Path(*folder.parts[:1]) if deep else folder].append(path)
    return [_text_document(sorted(paths), name=folder.as_posix()) for folder, paths in directories.items()]


def _text_document(paths: list[Path], *, name: str) -> SourceDocument:
    def read() -> str:
        return "\n".join(_read_utf8(path) for path in paths)

    return SourceDocument(id=name, n_bytes=sum(path.stat().st_size for path in paths), read=read)


def _read_utf8(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: not UTF-8 text (byte {error.start})") from error
