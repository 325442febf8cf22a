"""`longlaw merge` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from longlaw.cli import app
from tests.workers.merge_folders import folders
from workers.errors import MergeError

VALUES = [{"w": torch.tensor([value])} for value in (1.0, 2.0, 4.0)]


def longlaw(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["merge", *map(str, arguments)])


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    return folders(tmp_path / "run", VALUES, steps=(10, 20, 30))


def test_a_rule_is_asked_for_by_name_and_the_report_counts_tensors(sources: list[Path], tmp_path: Path) -> None:
    outcome = longlaw(tmp_path / "out", *sources, "--rule", "ema", "--decay", 0.5, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert (report["rule"], report["averaged"], report["copied"], report["size_bytes"]) == ("ema", 1, 0, 4)
    assert report["files"] == ["model.safetensors"]
    merged = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(merged["w"], torch.tensor([(0.25 * 1 + 0.5 * 2 + 4) / 1.75]))


def test_the_mean_is_the_default_and_takes_a_type(sources: list[Path], tmp_path: Path) -> None:
    outcome = longlaw(tmp_path / "out", *sources, "--dtype", "bf16")
    assert "1 tensors merged by last_m" in outcome.stdout
    assert load_file(tmp_path / "out" / "model.safetensors")["w"] == torch.tensor([7 / 3]).bfloat16()


def test_steps_and_spacing_can_be_given(tmp_path: Path) -> None:
    sources = folders(tmp_path / "run", VALUES)  # they do not tell their steps
    steps = ["--step", 0, "--step", 64, "--step", 100]
    outcome = longlaw(tmp_path / "sqrt", *sources, "--rule", "one_sqrt", *steps)
    assert outcome.exit_code == 0, outcome.stderr
    merged = load_file(tmp_path / "sqrt" / "model.safetensors")
    torch.testing.assert_close(merged["w"], torch.tensor([(0.4 * 2 + 4) / 1.4]))
    ema = longlaw(tmp_path / "ema", *sources, "--rule", "ema", "--decay", 0.5, *steps)
    assert isinstance(ema.exception, MergeError)
    assert "lie 36, 64 steps apart: say --spacing STEPS" in str(ema.exception)
    assert longlaw(tmp_path / "ema", *sources, "--rule", "ema", "--decay", 0.5, *steps, "--spacing", 36).exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rule", "ema"], "--rule ema needs --decay"),
        (["--rule", "dare"], "--rule dare needs --density"),
        (["--decay", "0.5"], "--decay is of ema, not of --rule last_m"),
        (["--rule", "ties", "--density", "0.5", "--step", "1"], "--step is of one_sqrt and ema"),
        (["--rule", "raw"], "takes 1 checkpoints, 3 were given"),
    ],
)
def test_what_a_rule_lacks_or_does_not_take_is_said(
    sources: list[Path], tmp_path: Path, options: list[str], message: str
) -> None:
    outcome = longlaw(tmp_path / "out", *sources, *options)
    assert isinstance(outcome.exception, MergeError)
    assert message in str(outcome.exception)
    assert not (tmp_path / "out").exists()


def test_an_unknown_rule_is_answered_with_the_known_ones(sources: list[Path], tmp_path: Path) -> None:
    outcome = longlaw(tmp_path / "out", *sources, "--rule", "slerp")
    assert outcome.exit_code == 2
    assert "one_sqrt" in outcome.stderr
