"""`longlaw model`, called as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from typer.testing import CliRunner

from longlaw.model_commands import model_app
from orchestrator.grid import parse_grid
from tests.orchestrator.small_grid import small_document
from tests.workers.test_folder_model import LLAMA_N, llama_folder

RUNNER = CliRunner()


def test_what_add_prints_is_an_entry_of_a_grids_scales(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "released-1B")
    result = RUNNER.invoke(model_app, ["add", str(folder), "--store", str(tmp_path / "store")])
    assert result.exit_code == 0, result.output
    document = small_document(scales=yaml.safe_load(result.stdout))
    document["recipe"]["long"] |= {"start_rate": 0.001, "rope": {"method": "ntk", "factor": 2}}
    del document["recipe"]["long"]["rope_base"]
    scale = parse_grid(document).resolve("released-1B")
    assert (scale.shape.n_params, scale.short_tokens_seen) == (LLAMA_N, None)
    assert scale.long.rope_base > 5e5
    assert (tmp_path / "store" / "models" / scale.shape.digest / "config.json").is_file()  # type: ignore[union-attr]


def test_json_is_for_programs(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "released")
    result = RUNNER.invoke(model_app, ["add", str(folder), "--store", str(tmp_path / "store"), "--json"])
    told = json.loads(result.stdout)
    assert (told["n_params"], told["head_dim"], told["rope_base"]) == (LLAMA_N, 8, 500_000.0)
