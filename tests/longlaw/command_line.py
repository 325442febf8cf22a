"""The command line, run in this process, which spares a second of imports each time."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from unittest import mock

from longlaw.cli import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    returncode: int
    stdout: str
    stderr: str


def longlaw(*arguments: str, url: str | None = None, **settings: str) -> Outcome:
    """What `longlaw ARGUMENTS` prints and how it ends, with `settings` in its environment."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    environment = settings | ({"LONGLAW_URL": url} if url else {})
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["longlaw", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if isinstance(end.code, str):
                print(end.code, file=err)  # as the interpreter does at its end
    return Outcome(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())
