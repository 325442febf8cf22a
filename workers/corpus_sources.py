"""Where a corpus's text comes from: documents with a name, a size and a way to read them.

Listing is cheap (names and sizes); text is read only for the documents that the corpus takes.
"""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from workers.errors import CorpusError

#: Differs between builds of one torch version (CPU, CUDA); without it they yield the same corpus.
_BUILD_SPECIFIC = "version.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDocument:
    """One document: `id` is unique and free of machine paths, `n_bytes` its size as UTF-8."""

    id: str
    n_bytes: int
    read: Callable[[], str]


class CorpusSource(Protocol):
    """Something that lists documents. `label` is written into the manifest."""

    @property
    def label(self) -> str: ...

    def documents(self) -> list[SourceDocument]:
        """All documents, in any order.

        Raises:
            CorpusError: if there is none, or one cannot be listed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSource:
    """The `.py` sources of the installed torch package, one document per directory. torch is not imported."""

    label: str = "torch"

    def documents(self) -> list[SourceDocument]:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            raise CorpusError("torch is not installed: install longlaw[worker], or build from a folder of text")
        root = Path(spec.submodule_search_locations[0])
        files = [path for path in root.rglob("*.py") if path != root / _BUILD_SPECIFIC]
        return _by_directory(files, root=root.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource:
    """A folder of UTF-8 text and JSON-lines files (hidden ones are left out).

    `documents_by` "file" makes a document of each text file, "directory" of all text files that lie in one directory.
    Each line of a `.jsonl` file is a document by itself: an object with its text in the field `text_field`.
    """

    path: Path
    documents_by: Literal["file", "directory"] = "file"
    text_field: str = "text"
    label: str = "folder"

    def documents(self) -> list[SourceDocument]:
        if not self.path.is_dir():
            raise CorpusError(f"{self.path} is not a folder")
        files = [path for path in self.path.rglob("*") if path.is_file() and not _hidden(path.relative_to(self.path))]
        texts = [path for path in files if path.suffix != ".jsonl"]
        if self.documents_by == "directory":
            found = _by_directory(texts, root=self.path)
        else:
            found = [_text_document([path], name=path.relative_to(self.path).as_posix()) for path in texts]
        for path in files:
            if path.suffix == ".jsonl":
                found.extend(self._lines(path))
        found = [document for document in found if document.n_bytes]
        if not found:
            raise CorpusError(f"{self.path} holds no text: expected non-empty text files, or .jsonl files")
        return found

    def _lines(self, path: Path) -> Iterator[SourceDocument]:
        name = path.relative_to(self.path).as_posix()
        with path.open("rb") as lines:
            offset = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    text = self._parse(line, where=f"{path}, line {number}")
                    read = _line_reader(self, path, offset, number)
                    yield SourceDocument(id=f"{name}:{number}", n_bytes=len(text.encode()), read=read)
                offset += len(line)

    def _parse(self, line: bytes, *, where: str) -> str:
        try:
            value = json.loads(line)
        except UnicodeDecodeError as error:
            raise CorpusError(f"{where}: not UTF-8 ({error})") from error
        except json.JSONDecodeError as error:
            raise CorpusError(f"{where}: not JSON ({error})") from error
        text = value.get(self.text_field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise CorpusError(f'{where}: no text in the field "{self.text_field}"')
        return text


def _line_reader(source: FolderSource, path: Path, offset: int, number: int) -> Callable[[], str]:
    def read() -> str:
        with path.open("rb") as lines:
            lines.seek(offset)
            return source._parse(lines.readline(), where=f"{path}, line {number}")

    return read


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _by_directory(files: list[Path], *, root: Path) -> list[SourceDocument]:
    directories: dict[Path, list[Path]] = defaultdict(list)
    for path in files:
        directories[path.parent].append(path)
    documents = [
        _text_document(sorted(paths), name=directory.relative_to(root).as_posix())
        for directory, paths in directories.items()
    ]
    return [document for document in documents if document.n_bytes]


def _text_document(paths: list[Path], *, name: str) -> SourceDocument:
    def read() -> str:
        return "\n".join(_read_utf8(path) for path in paths)

    return SourceDocument(id=name, n_bytes=sum(path.stat().st_size for path in paths), read=read)


def _read_utf8(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: not UTF-8 text (byte {error.start})") from error
