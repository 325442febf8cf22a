"""Ready grids: found by name wherever Longlaw is installed, and usable as they are."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from longlaw.grid_document import GridFileError, read_grid_file
from longlaw.ready_grids import ready_command, ready_grid, ready_grids
from orchestrator.grid import Grid

GRIDS = Path(__file__).parents[2] / "grids"


def test_every_ready_grid_is_listed_with_its_first_sentence() -> None:
    app = typer.Typer()
    app.command()(ready_command)
    listed = CliRunner().invoke(app, []).stdout.splitlines()
    assert [line.split()[0] for line in listed] == sorted(path.stem for path in GRIDS.glob("*.yaml"))
    assert all(line.endswith(".") and len(line.split()) > 5 for line in listed)
    assert CliRunner().invoke(app, ["tiny"]).stdout == (GRIDS / "tiny.yaml").read_text()


@pytest.mark.parametrize("name", sorted(ready_grids()))
def test_ready_grid_is_a_grid(name: str) -> None:
    assert Grid.model_validate(read_grid_file(str(ready_grid(name)))).name == name


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(GridFileError, match=r"'tiney'; there are .*quickstart, tiny$"):
        ready_grid("tiney")
