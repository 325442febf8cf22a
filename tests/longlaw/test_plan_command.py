import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from typer.testing import CliRunner, Result

from longlaw.plan_command import plan_command
from tests.orchestrator.small_grid import small_document

GRIDS = Path(__file__).parents[2] / "grids"

COUNT = {"type": "integer", "minimum": 0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "cells": COUNT,
        "segments": COUNT,
        "evaluations": COUNT,
        "tokens": {
            "properties": {"train": COUNT, "independent": COUNT},
            "required": ["train", "independent"],
            "additionalProperties": False,
        },
        "flops": {"type": "number"},
        "gpu_hours": {"type": "number"},
        "checkpoint_bytes": COUNT,
        "per_scale": {
            "items": {
                "properties": {"scale": {"type": "string"}, "n_params": COUNT, "cells": COUNT, "tokens_train": COUNT}
                | {"tokens_independent": COUNT},
                "required": ["scale", "n_params", "cells", "tokens_train", "tokens_independent"],
                "additionalProperties": False,
            }
        },
    },
    "required": [
        *("cells", "segments", "evaluations", "tokens", "flops", "gpu_hours", "checkpoint_bytes", "per_scale"),
        *("cells_detail", "segments_detail", "evaluations_detail"),
    ],
}


def run(*arguments: str, text: str | None = None) -> Result:
    app = typer.Typer()
    app.command()(plan_command)
    return CliRunner().invoke(app, arguments, input=text)


def test_json_has_the_promised_keys_and_the_lists_have_the_promised_lengths() -> None:
    result = run(str(GRIDS / "paper-constant.yaml"), "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    jsonschema.validate(document, SCHEMA)
    for name in ("cells", "segments", "evaluations"):
        assert len(document[f"{name}_detail"]) == document[name]
    assert document["tokens"]["train"] == sum(row["tokens_train"] for row in document["per_scale"])
    assert document["tokens"]["train"] == sum(segment["tokens_train"] for segment in document["segments_detail"])
    assert document["flops"] == document["flops_by_kind"]["train"] + document["flops_by_kind"]["evaluate"]
    assert {cell["status"] for cell in document["cells_detail"]} == {"new"}


def test_a_person_sees_the_totals_the_saving_and_the_rate() -> None:
    result = run(str(GRIDS / "paper-linear-decay.yaml"))
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "Plan of 'paper-linear-decay', protocol linear_decay"
    assert any(line.startswith("cells 109 ") for line in lines)
    assert any("4.46 times fewer than independent cells" in line for line in lines)
    assert any(line.startswith("GPU-hours ") and line.endswith("at 4e+14 FLOP/s, 40% of it reached") for line in lines)
    assert "S1 31,140,352 25 40.484 B 1,300.1 233.555 B 7,500.1" in lines
    assert lines[-1].startswith("warning: /evaluation/reference: without a digest")


def test_standard_input_may_hold_yaml_or_json() -> None:
    """B109: counts beyond 2^53 are printed digit by digit."""
    count = 9_007_199_254_740_993
    document = small_document(long_tokens=[count], product_scales=["a"])
    document["recipe"]["long"]["seq_len"] = 3
    for text in (json.dumps(document), f"# YAML\n{json.dumps(document)}"):
        result = run("-", "--json", text=text)
        assert result.exit_code == 0
        assert f'"long_tokens": {count}' in result.stdout


def test_every_problem_is_printed_with_its_place_and_the_exit_code_is_2(tmp_path: Path) -> None:
    document = small_document(short_tokens=[0, 720])
    document["scales"]["a"]["heads"] = 3
    document["protokol"] = "constant"
    file = tmp_path / "grid.json"
    file.write_text(json.dumps(document))
    result = run(str(file), "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"{file} cannot be planned:",
        "  /scales/a/heads: 3 heads do not divide the width 4",
        "  /short_tokens/0: a budget must be above zero, not '0'",
        "  /protokol: unknown key; did you mean 'protocol'?",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "grid.yaml: no such file or directory"),
        (b"\xff\xfe", "not a text file (no UTF-8 at byte 0)"),
        (b"a: [1", "line 1"),
        (b"", "must be a mapping"),
    ],
)
def test_an_unreadable_file_is_an_error_without_a_traceback(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "grid.yaml"
    if content is not None:
        file.write_bytes(content)
    result = run(str(file))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_budgets_that_do_not_fit_are_planning_errors_with_places_too() -> None:
    result = run("-", text=json.dumps(small_document(short_tokens=[720, 721])))
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == "standard input cannot be planned:"
    assert "/short_tokens/1: scale a, D_s = 721 and 720 (/short_tokens/0) both become 90 steps" in result.stderr
