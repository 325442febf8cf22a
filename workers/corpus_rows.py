"""Documents that are rows: of JSON lines, of Parquet files, of Hugging Face datasets on disk.

Rows are listed with their sizes and read when a corpus takes them: of Parquet one row group is in memory at a time, of
a dataset what its memory map holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from workers.errors import CorpusError

#: What a document consists of: text, or the ids that a tokenizer made of it.
Content = str | npt.NDArray[np.int64]

_BYTES_PER_ID = 4
_ROWS_AT_ONCE = 1000
#: JSON can spell it, UTF-8 and tokenizers cannot.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDocument:
    """One document: `id` is unique and free of machine paths, `n_bytes` its size as UTF-8 (four bytes a token id),
    without the line breaks between parts that were joined.

    Documents with the same `near` lie together and are best read one after another.
    """

    id: str
    n_bytes: int
    read: Callable[[], Content]
    near: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFields:
    """Which fields of a row make a document: its text, or token ids instead; rows of one `group` make one together."""

    text: str = "text"
    ids: str | None = None
    group: str | None = None

    @property
    def content(self) -> str:
        return self.ids or self.text

    @property
    def wanted(self) -> str:
        return "token ids" if self.ids else "text"

    @property
    def columns(self) -> list[str]:
        return [self.content, *([self.group] if self.group else [])]


#: Rows with text in the usual field.
TEXT_ROWS = RowFields()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row before grouping; `near` as in `SourceDocument`."""

    id: str
    n_bytes: int
    group: str | None
    read: Callable[[], Content]
    near: str | None = None


def documents_of_rows(rows: Iterable[Row]) -> list[SourceDocument]:
    """A document of each row, or of all rows of a group in their order: texts with a line break between, ids as they
    are. Empty ones are left out."""
    groups: dict[tuple[bool, str], list[Row]] = {}
    for row in rows:
        key = (False, row.id) if row.group is None else (True, row.group)
        groups.setdefault(key, []).append(row)
    return [
        SourceDocument(
            id=name, n_bytes=sum(row.n_bytes for row in members), read=_reader(members), near=members[0].near
        )
        for (_, name), members in groups.items()
        if any(row.n_bytes for row in members)
    ]


def _reader(rows: list[Row]) -> Callable[[], Content]:
    if len(rows) == 1:
        return rows[0].read

    def read() -> Content:
        texts, ids = [], []
        for content in (row.read() for row in rows):
            if isinstance(content, str):
                texts.append(content)
            else:
                ids.append(content)
        return np.concatenate(ids) if ids else "\n".join(texts)

    return read


def json_rows(path: Path, name: str, fields: RowFields) -> Iterator[Row]:
    """One row for each line of a file that is not blank; `name` is the file's in ids."""
    with path.open("rb") as lines:
        offset = 0
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = _JsonLine(path=path, offset=offset, number=number, fields=fields)
                content, group = place.parse(line)
                yield Row(id=f"{name}:{number}", n_bytes=_size(content), group=group, read=place.read)
            offset += len(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class _JsonLine:
    path: Path
    offset: int
    number: int
    fields: RowFields

    def read(self) -> Content:
        with self.path.open("rb") as lines:
            lines.seek(self.offset)
            return self.parse(lines.readline())[0]

    def parse(self, line: bytes) -> tuple[Content, str | None]:
        where = f"{self.path}, line {self.number}"
        try:
            value = json.loads(line)
        except UnicodeDecodeError as error:
            raise CorpusError(f"{where}: not UTF-8 ({error})") from error
        except RecursionError:
            raise CorpusError(f"{where}: nested too deeply to be read") from None
        except ValueError as error:  # also of a number with thousands of digits
            raise CorpusError(f"{where}: not JSON ({error})") from error
        found = value if isinstance(value, dict) else {}
        content, group = found.get(self.fields.content), None
        if self.fields.ids and isinstance(content, list) and all(_is_id(token) for token in content):
            content = np.asarray(content, dtype=np.int64)
        elif self.fields.ids or not isinstance(content, str):
            raise CorpusError(f'{where}: no {self.fields.wanted} in the field "{self.fields.content}"')
        elif _LONE_SURROGATE.search(content):
            raise CorpusError(
                f'{where}: the field "{self.fields.content}" holds half a surrogate pair, which is no text'
            )
        if self.fields.group:
            group = found.get(self.fields.group)
            if not isinstance(group, str):
                raise CorpusError(f'{where}: no name of a group in the field "{self.fields.group}"')
        return content, group


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _size(content: Content) -> int:
    return len(content.encode()) if isinstance(content, str) else _BYTES_PER_ID * len(content)


def parquet_rows(path: Path, name: str, fields: RowFields) -> Iterator[Row]:
    """One row for each row of a file; those of a row group are near each other."""
    file = _ParquetFile(path=path, fields=fields)
    with file.opened() as opened:
        _check_columns(opened.schema_arrow, fields, where=str(path))
        first = 0
        for row_group in range(opened.num_row_groups):
            table = opened.read_row_group(row_group, columns=fields.columns)
            for index, (size, group) in enumerate(_measured(table, fields, where=str(path), first=first)):
                yield Row(
                    id=f"{name}:{first + index + 1}",
                    n_bytes=size,
                    group=group,
                    read=_ParquetRow(file=file, row_group=row_group, index=index).read,
                    near=f"{name}:{row_group}",
                )
            first += len(table)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ParquetFile:
    """A file as it was listed; it is open only while it is read, since a folder may hold very many."""

    path: Path
    fields: RowFields

    @contextmanager
    def opened(self) -> Iterator[pq.ParquetFile]:
        try:
            with pq.ParquetFile(self.path) as file:
                yield file
        except (pa.ArrowException, OSError) as error:
            raise CorpusError(f"{self.path} cannot be read as a Parquet file: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParquetRow:
    file: _ParquetFile
    row_group: int
    index: int

    def read(self) -> Content:
        return _content(_row_group(self.file, self.row_group)[self.index].as_py())


@lru_cache(maxsize=1)
def _row_group(file: _ParquetFile, row_group: int) -> pa.ChunkedArray:
    """The contents of a row group; only the last one that was read is kept."""
    with file.opened() as opened:
        return opened.read_row_group(row_group, columns=[file.fields.content]).column(0)


def dataset_rows(path: Path, fields: RowFields) -> Iterator[Row]:
    """One row for each row of a dataset that `datasets` saved to disk.

    Raises:
        CorpusError: if `datasets` is not installed, or the folder holds no dataset, or several splits.
    """
    try:
        import datasets
    except ImportError:
        raise CorpusError("reading Hugging Face datasets needs that library: install longlaw[datasets]") from None
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(str(path / name) for name in json.loads((path / "dataset_dict.json").read_text())["splits"])
        raise CorpusError(f"{path} holds several datasets: give one of {splits}")
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise CorpusError(f"{path} is not a dataset on disk: {error}") from error
    _check_columns(found.features.arrow_schema, fields, where=str(path))
    rows = found.select_columns(fields.columns).with_format("arrow")
    contents = found.select_columns([fields.content]).with_format("arrow")
    first = 0
    for table in rows.iter(batch_size=_ROWS_AT_ONCE):
        for index, (size, group) in enumerate(_measured(table, fields, where=str(path), first=first), start=first):
            yield Row(id=f"row:{index + 1}", n_bytes=size, group=group, read=_DatasetRow(contents, index).read)
        first += len(table)


@dataclass(frozen=True, slots=True)
class _DatasetRow:
    rows: Any
    index: int

    def read(self) -> Content:
        return _content(self.rows[self.index].column(0)[0].as_py())


def _content(value: str | list[int]) -> Content:
    return value if isinstance(value, str) else np.asarray(value, dtype=np.int64)


def _check_columns(schema: pa.Schema, fields: RowFields, *, where: str) -> None:
    for name in fields.columns:
        if name not in schema.names:
            raise CorpusError(f'{where} has no field "{name}"; it has: {", ".join(schema.names)}')
    kind = schema.field(fields.content).type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    fits = lists and pa.types.is_integer(kind.value_type) if fields.ids else _is_text(kind)
    if not fits:
        raise CorpusError(f'{where}: the field "{fields.content}" holds {kind}, not {fields.wanted}')
    if fields.group and not _is_text(schema.field(fields.group).type):
        raise CorpusError(
            f'{where}: the field "{fields.group}" holds {schema.field(fields.group).type}, not names of groups'
        )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _measured(table: pa.Table, fields: RowFields, *, where: str, first: int) -> Iterator[tuple[int, str | None]]:
    """Size in bytes and group of each row; rows are counted from `first`."""
    column = table.column(fields.content)
    sizes = pc.list_value_length(column) if fields.ids else pc.binary_length(column)
    groups = table.column(fields.group).to_pylist() if fields.group else [None] * len(table)
    for index, (size, group) in enumerate(zip(sizes.to_pylist(), groups, strict=True), start=first + 1):
        if size is None:
            raise CorpusError(f'{where}, row {index}: no {fields.wanted} in the field "{fields.content}"')
        if fields.group and group is None:
            raise CorpusError(f'{where}, row {index}: no name of a group in the field "{fields.group}"')
        yield size * (_BYTES_PER_ID if fields.ids else 1), group
