"""Commands that are imported when they are called, not when they are listed: `longlaw --help` imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    """Where a command lives (a function or a `typer.Typer`), and what the list says of it."""

    module: str
    attribute: str
    help: str


class LazyGroup(TyperGroup):
    """A group whose `lazy` commands come first, listed in that order."""

    lazy: ClassVar[Mapping[str, LazyCommand]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        listed = {name: TyperCommand(name, help=command.help) for name, command in self.lazy.items()}
        self.commands = {**listed, **self.commands}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that `args` call for, imported, and what is left of them."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self.lazy:
            command = _load(name, self.lazy[name])
        return name, command, rest


def _load(name: str, command: LazyCommand) -> Any:
    found = getattr(importlib.import_module(command.module), command.attribute)
    if isinstance(found, typer.Typer):
        loaded: Any = typer.main.get_group(found)
    else:
        single = typer.Typer(add_completion=False)
        single.command(name)(found)
        loaded = typer.main.get_command(single)
    loaded.name = name
    return loaded
