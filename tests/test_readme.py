"""What the README and the pages tell people to type is what the commands take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from longlaw.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _commands() -> list[str]:
    """Every `longlaw ...` that stands at the start of a line of a code block, or in backquotes with an argument."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        lines = [line.partition("  #")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        spans = re.findall(r"`(?:docker compose run [^`]* worker )?(longlaw [^`]+)`", text)
        for line in [*lines, *spans]:
            for part in line.split("&&"):
                command = part.partition(" > ")[0].strip()
                if command.startswith("longlaw ") and not re.search(r"\.\.\.| \[", command):  # no synopsis
                    found[command] = None
    return list(found)


def test_there_are_commands_to_check() -> None:
    assert len(_commands()) > 10


@pytest.mark.parametrize("command", _commands())
def test_documented_command_is_understood(command: str) -> None:
    """Its arguments are parsed and nothing is run; without any it is a mention, whose name must exist."""
    name, arguments = "longlaw", shlex.split(command)[1:]
    found: Any = typer.main.get_command(app)
    while hasattr(found, "resolve_command") and arguments:
        group = found.make_context(name, [], resilient_parsing=True)
        name, found, arguments = found.resolve_command(group, arguments)
    if arguments:
        found.make_context(name, list(arguments))
