"""Documents that are rows: of JSON lines, of Parquet files, of Hugging Face datasets on disk.

Rows are listed with their sizes and read when a corpus takes them: of Parquet one row group is in memory at a time, of
a dataset what its memory map holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
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

from workers.conversations import LONE_SURROGATE, PLAIN_CHAT, Chat, Exchange, messages, prompt_and_answer
from workers.errors import CorpusError

#: What a document consists of: text, the ids that a tokenizer made of it, or turns of which some are answers.
Content = str | npt.NDArray[np.int64] | Exchange

_BYTES_PER_ID = 4
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDocument:
    """One document: `id` is unique and free of machine paths, `n_bytes` its size as UTF-8 (four bytes a token id),
    without the line breaks between parts that were joined and what a chat adds to its turns.

    Documents with the same `near` lie together and are best read one after another. Exchanges without an answer are
    not `answered`.
    """

    id: str
    n_bytes: int
    read: Callable[[], Content]
    near: str | None = None
    answered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFields:
    """Which fields of a row make a document: its text, or token ids instead; rows of one `group` make one together.

    Or what is said in turns, of which the answers are learned: `prompt` and `answer`, or `messages`, written as `chat`
    does.

    Raises:
        CorpusError: if the fields do not go together.
    """

    text: str = "text"
    ids: str | None = None
    group: str | None = None
    prompt: str | None = None
    answer: str | None = None
    messages: str | None = None
    chat: Chat = PLAIN_CHAT

    def __post_init__(self) -> None:
        if (self.prompt is None) != (self.answer is None):
            raise CorpusError("a field of prompts and one of answers belong together: give both")
        if sum(field is not None for field in (self.ids, self.prompt, self.messages)) > 1:
            raise CorpusError("rows hold token ids, prompts with answers, or messages: give the fields of one of these")
        if self.turns and self.group is not None:
            raise CorpusError("each prompt with its answer, or list of messages, is a document by itself: do not group")

    @property
    def turns(self) -> bool:
        """Whether a row holds turns."""
        return self.prompt is not None or self.messages is not None

    @property
    def content(self) -> tuple[str, ...]:
        if self.prompt is not None and self.answer is not None:
            return self.prompt, self.answer
        return (self.messages or self.ids or self.text,)

    @property
    def wanted(self) -> str:
        if self.prompt is not None:
            return "prompts with answers"
        return "messages" if self.messages else "token ids" if self.ids else "text"

    @property
    def columns(self) -> list[str]:
        return [*self.content, *([self.group] if self.group else [])]

    def exchange(self, row: Mapping[str, Any], *, where: str) -> Exchange:
        """The turns of a row.

        Raises:
            CorpusError: if it has none; the message names `where` it is.
        """
        if self.prompt is not None and self.answer is not None:
            return prompt_and_answer(row, self.prompt, self.answer, where=where)
        return messages(row, str(self.messages), self.chat, where=where)


#: Rows with text in the usual field.
TEXT_ROWS = RowFields()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row before grouping; `near` and `answered` as in `SourceDocument`."""

    id: str
    n_bytes: int
    group: str | None
    read: Callable[[], Content]
    near: str | None = None
    answered: bool = True


def documents_of_rows(rows: Iterable[Row]) -> list[SourceDocument]:
    """A document of each row, or of all rows of a group in their order: texts with a line break between, ids as they
    are. Empty ones are left out."""
    groups: dict[tuple[bool, str], list[Row]] = {}
    for row in rows:
        key = (False, row.id) if row.group is None else (True, row.group)
        groups.setdefault(key, []).append(row)
    return [
        SourceDocument(
            id=name,
            n_bytes=sum(row.n_bytes for row in members),
            read=_reader(members),
            near=members[0].near,
            answered=members[0].answered,  # exchanges are never grouped
        )
        for (_, name), members in groups.items()
        if any(row.n_bytes or not row.answered for row in members)
    ]


def _reader(rows: list[Row]) -> Callable[[], Content]:
    if len(rows) == 1:
        return rows[0].read

    def read() -> Content:
        texts, ids = [], []
        for content in (row.read() for row in rows):
            if isinstance(content, str):
                texts.append(content)
            elif isinstance(content, np.ndarray):
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
                yield Row(
                    id=f"{name}:{number}",
                    n_bytes=_size(content),
                    group=group,
                    read=place.read,
                    answered=_answered(content),
                )
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
        if self.fields.turns:
            return self.fields.exchange(found, where=where), None
        (field,) = self.fields.content
        content, group = found.get(field), None
        if self.fields.ids and isinstance(content, list) and all(_is_id(token) for token in content):
            content = np.asarray(content, dtype=np.int64)
        elif self.fields.ids or not isinstance(content, str):
            raise CorpusError(f'{where}: no {self.fields.wanted} in the field "{field}"')
        elif LONE_SURROGATE.search(content):
            raise CorpusError(f'{where}: the field "{field}" holds half a surrogate pair, which is no text')
        if self.fields.group:
            group = found.get(self.fields.group)
            if not isinstance(group, str):
                raise CorpusError(f'{where}: no name of a group in the field "{self.fields.group}"')
        return content, group


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _size(content: Content) -> int:
    if isinstance(content, Exchange):
        return content.n_bytes
    return len(content.encode()) if isinstance(content, str) else _BYTES_PER_ID * len(content)


def _answered(content: Content) -> bool:
    return not isinstance(content, Exchange) or content.answered


def parquet_rows(path: Path, name: str, fields: RowFields) -> Iterator[Row]:
    """One row for each row of a file; those of a row group are near each other."""
    file = _ParquetFile(path=path, fields=fields)
    with file.opened() as opened:
        _check_columns(opened.schema_arrow, fields, where=str(path))
        first = 0
        for row_group in range(opened.num_row_groups):
            table = opened.read_row_group(row_group, columns=fields.columns)
            for index, (size, group, answered) in enumerate(_measured(table, fields, where=str(path), first=first)):
                yield Row(
                    id=f"{name}:{first + index + 1}",
                    n_bytes=size,
                    group=group,
                    read=_ParquetRow(file=file, row_group=row_group, index=index).read,
                    near=f"{name}:{row_group}",
                    answered=answered,
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
        return _content(_row_group(self.file, self.row_group), self.index, self.file.fields, where=str(self.file.path))


@lru_cache(maxsize=1)
def _row_group(file: _ParquetFile, row_group: int) -> pa.Table:
    """The contents of a row group; only the last one that was read is kept."""
    with file.opened() as opened:
        return opened.read_row_group(row_group, columns=list(file.fields.content))


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
    contents = found.select_columns(list(fields.content)).with_format("arrow")
    first = 0
    for table in rows.iter(batch_size=_ROWS_AT_ONCE):
        measured = enumerate(_measured(table, fields, where=str(path), first=first), start=first)
        for index, (size, group, answered) in measured:
            yield Row(
                id=f"row:{index + 1}",
                n_bytes=size,
                group=group,
                read=_DatasetRow(contents, index, fields, str(path)).read,
                answered=answered,
            )
        first += len(table)


@dataclass(frozen=True, slots=True)
class _DatasetRow:
    rows: Any
    index: int
    fields: RowFields
    where: str

    def read(self) -> Content:
        return _content(self.rows[self.index], 0, self.fields, where=self.where)


def _content(table: pa.Table, index: int, fields: RowFields, *, where: str) -> Content:
    """Of one row."""
    row = {name: table.column(name)[index].as_py() for name in fields.content}
    if fields.turns:
        return fields.exchange(row, where=where)
    (value,) = row.values()
    return value if isinstance(value, str) else np.asarray(value, dtype=np.int64)


def _check_columns(schema: pa.Schema, fields: RowFields, *, where: str) -> None:
    for name in fields.columns:
        if name not in schema.names:
            raise CorpusError(f'{where} has no field "{name}"; it has: {", ".join(schema.names)}')
    for name in fields.content:
        kind = schema.field(name).type
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if fields.ids:
            fits = lists and pa.types.is_integer(kind.value_type)
        elif fields.messages:
            fits = lists and pa.types.is_struct(kind.value_type)
        else:
            fits = _is_text(kind)
        if not fits:
            raise CorpusError(f'{where}: the field "{name}" holds {kind}, not {fields.wanted}')
    if fields.group and not _is_text(schema.field(fields.group).type):
        raise CorpusError(
            f'{where}: the field "{fields.group}" holds {schema.field(fields.group).type}, not names of groups'
        )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _measured(table: pa.Table, fields: RowFields, *, where: str, first: int) -> Iterator[tuple[int, str | None, bool]]:
    """Size in bytes and group of each row, and whether it is answered; rows are counted from `first`."""
    if fields.turns:
        for number, row in enumerate(table.to_pylist(), start=first + 1):
            exchange = fields.exchange(row, where=f"{where}, row {number}")
            yield exchange.n_bytes, None, exchange.answered
        return
    column = table.column(fields.content[0])
    sizes = pc.list_value_length(column) if fields.ids else pc.binary_length(column)
    groups = table.column(fields.group).to_pylist() if fields.group else [None] * len(table)
    for index, (size, group) in enumerate(zip(sizes.to_pylist(), groups, strict=True), start=first + 1):
        if size is None:
            raise CorpusError(f'{where}, row {index}: no {fields.wanted} in the field "{fields.content[0]}"')
        if fields.group and group is None:
            raise CorpusError(f'{where}, row {index}: no name of a group in the field "{fields.group}"')
        yield size * (_BYTES_PER_ID if fields.ids else 1), group, True
