"""`longlaw demo`: from nothing to a prediction, and a second time without training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from database.settings import Settings
from longlaw.stack import Stack, StackError

TINY = str(Path(__file__).parents[2] / "grids" / "tiny.yaml")


def _demo(home: Path, *options: str) -> str:
    environment = {**os.environ, "LONGLAW_HOME": str(home), "COLUMNS": "200"}
    environment.pop("LONGLAW_DATABASE_URL", None)
    outcome = subprocess.run(
        [sys.executable, "-m", "longlaw.cli", "demo", TINY, "--exit", "--workers", "1", *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    logs = "".join(f"\n{log}:\n{log.read_text()[-3000:]}" for log in (home / "logs").glob("*.log"))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr + logs
    return outcome.stdout


@pytest.mark.timeout(580)
def test_demo_measures_fits_and_predicts_and_the_second_run_trains_nothing(reachable_tmp_path: Path) -> None:
    first = _demo(reachable_tmp_path)
    assert "Planned: 65,024 tokens to train" in first
    assert "SUCCEEDED 100% of 65,024 tokens, 8/8 cells" in first
    assert len(re.findall(r"^w(?:32|64) ", first, flags=re.MULTILINE)) >= 8
    assert "The law, fitted to all 8 observations" in first
    assert "http://127.0.0.1:" in first

    second = _demo(reachable_tmp_path, "--report", str(reachable_tmp_path / "report"))
    assert "nothing is trained" in second
    assert "Planned: 0 tokens to train" in second
    tables = [re.findall(r"^w(?:32|64) .*$", output, flags=re.MULTILINE) for output in (first, second)]
    assert tables[0] == tables[1]
    assert "8 of 8" in (reachable_tmp_path / "report" / "tiny.md").read_text()
    assert list((reachable_tmp_path / "report" / "images" / "tiny").glob("*.png"))

    left = [p for p in psutil.process_iter(["cmdline"]) if str(reachable_tmp_path) in " ".join(p.info["cmdline"] or ())]
    assert not left


def test_second_stack_in_one_home_is_refused(reachable_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGLAW_HOME", str(reachable_tmp_path))
    monkeypatch.delenv("LONGLAW_DATABASE_URL", raising=False)
    with (
        Stack(settings=Settings(), workers=1),
        pytest.raises(StackError, match="already runs"),
        Stack(settings=Settings()),
    ):
        pass
