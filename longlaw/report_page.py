"""A report as a page: sections of text, tables and figures, written as Markdown beside its images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

_DPI = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Text in columns. The first `labels` columns are names, set left; the others are numbers, set right."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure, the name of its file, and what it shows for those who cannot see it."""

    name: str
    figure: Figure
    shows: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Sentences that follow from the numbers above them."""

    sentences: tuple[str, ...]


Block = str | Table | Picture | Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


def absent(title: str, reason: str) -> Section:
    """A section that the measurements do not allow, and the sentence that says why."""
    return Section(title=title, blocks=(f"*Left out: {reason}*",))


def write_page(directory: Path, name: str, title: str, opening: str, sections: Sequence[Section]) -> Path:
    """Writes DIRECTORY/NAME.md and its figures into DIRECTORY/images/NAME/; returns the page's path."""
    images = directory / "images" / name
    images.mkdir(parents=True, exist_ok=True)
    parts = [f"# {title}", opening]
    for section in sections:
        parts.append(f"## {section.title}")
        for block in section.blocks:
            if isinstance(block, Picture):
                block.figure.savefig(images / f"{block.name}.png", dpi=_DPI, metadata={"Software": None})
                parts.append(f"![{block.shows}](images/{name}/{block.name}.png)")
            else:
                parts.append(_markdown(block))
    page = directory / f"{name}.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def _markdown(block: str | Table | Reading) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Reading):
        return "\n".join(f"- {sentence}" for sentence in block.sentences)
    rule = ["---" if column < block.labels else "---:" for column in range(len(block.header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (block.header, rule, *block.rows))


def nats(value: float | None) -> str:
    """Three digits after the point; a dash where there is no number."""
    return "-" if value is None else f"{value:.3f}"


def signed(value: float | None, error: float | None = None) -> str:
    """As `nats`, with its sign, and its standard error where there is one."""
    if value is None:
        return "-"
    return f"{value:+.3f}" + ("" if error is None else f" ± {error:.3f}")


def percent(value: float | None) -> str:
    """One digit after the point."""
    return "-" if value is None else f"{value:.1f} %"


def share(count: int, total: int, what: str) -> str:
    """ "59 of 60 steps"."""
    return f"{count} of {total} {what}"
