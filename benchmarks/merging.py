"""Merging checkpoints beside mergekit 0.1.5, on the same four Llama folders.

``python -m benchmarks.merging [--json] [--rounds N] [--mergekit-python PYTHON]``; without a Python that has mergekit,
an environment of its own is made in a temporary folder. Every merge is a process of its own, one thread; the two take
turns, and the better of each one's rounds counts. Seconds are CPU time and memory is the kernel's peak of resident
memory, both of the whole process; `merge_cpu_s` and `merge_peak_bytes` leave out what the imports took.
`anonymous_peak_bytes`, sampled, also leaves out pages of files, which mergekit maps and the kernel could drop.

mergekit does its arithmetic in the checkpoints' own type unless told otherwise; "math" names that type. Where the rules
agree (linear and ties; its dare rescales by an L1 norm), the two results are compared number by number.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

MERGEKIT = "mergekit==0.1.5"
CHECKPOINTS = 4
DENSITY = 0.5
#: (stored type, mergekit's method, the type that it calculates in)
CASES = (
    ("float32", "linear", "float32"),
    ("float32", "ties", "float32"),
    ("float32", "dare_linear", "float32"),
    ("bfloat16", "linear", "bfloat16"),
    ("bfloat16", "linear", "float32"),
    ("bfloat16", "ties", "bfloat16"),
    ("bfloat16", "dare_linear", "bfloat16"),
)
_RULES = {"linear": "last_m", "ties": "ties", "dare_linear": "dare"}

_OURS = """
from workers.merged_folder import write_merged
from workers.spec import ObservationRule
import torch
torch.set_num_threads(1)
def merge(task):
    rule = ObservationRule(name=task["rule"], m=0, density=task["density"])
    write_merged([Path(source) for source in task["sources"]], rule, Path(task["out"]))
"""
_THEIRS = """
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
def merge(task):
    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True, num_threads=1, random_seed=42)
    options.apply_global_options()
    run_merge(MergeConfiguration.model_validate(task["mergekit"]), task["out"], options=options)
"""
#: Runs in either environment, so it may use nothing of ours. argv: the task and where the figures go.
_CHILD = """
import json, sys, time
from pathlib import Path
task = json.loads(sys.argv[1])
def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
{imports}
imported = time.process_time(), kib("VmRSS"), kib("RssAnon")
merge(task)
figures = dict(import_cpu_s=imported[0], cpu_s=time.process_time(), import_bytes=1024 * imported[1],
               import_anonymous_bytes=1024 * imported[2], peak_bytes=1024 * kib("VmHWM"))
Path(sys.argv[2]).write_text(json.dumps(figures))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a merge took, the imports included and left out."""

    cpu_s: float
    merge_cpu_s: float
    peak_bytes: int
    merge_peak_bytes: int
    anonymous_peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One case. Differences are over all numbers of the two results; None where the rules do not agree.

    `differing` counts numbers further apart than one unit in the last place of the stored type at the largest weight.
    """

    stored: str
    method: str
    mergekit_math: str
    ours: Cost
    mergekit: Cost
    numbers: int
    largest_difference: float | None
    differing: int | None


def make_checkpoints(root: Path) -> None:
    """Four Llamas of 52 million weights whose differences look like those of a training run, in two types."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1_376,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    for stored in ("float32", "bfloat16"):
        model = LlamaForCausalLM(config)
        for index in range(CHECKPOINTS):
            model.to(getattr(torch, stored)).save_pretrained(root / stored / str(index))
            model.float()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=2e-3)


def run_once(python: str, imports: str, task: dict[str, Any], figures: Path) -> Cost:
    """Merges in a process of its own and samples its anonymous memory meanwhile."""
    shutil.rmtree(task["out"], ignore_errors=True)
    command = [python, "-c", _CHILD.format(imports=imports), json.dumps(task), str(figures)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    anonymous = 0
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None:
            anonymous = max(anonymous, _anonymous_bytes(process.pid))
            time.sleep(0.02)
        assert process.stderr is not None
        if process.returncode:
            raise RuntimeError(process.stderr.read().decode())
    found = json.loads(figures.read_text())
    return Cost(
        cpu_s=found["cpu_s"],
        merge_cpu_s=found["cpu_s"] - found["import_cpu_s"],
        peak_bytes=found["peak_bytes"],
        merge_peak_bytes=found["peak_bytes"] - found["import_bytes"],
        anonymous_peak_bytes=max(anonymous - found["import_anonymous_bytes"], 0),
    )


def compare(root: Path, case: tuple[str, str, str], mergekit_python: str, rounds: int) -> Comparison:
    stored, method, math = case
    sources = [str(root / stored / str(index)) for index in range(CHECKPOINTS)]
    ours = {
        "rule": _RULES[method],
        "density": None if method == "linear" else DENSITY,
        "sources": sources,
        "out": str(root / "ours"),
    }
    theirs = {"mergekit": _mergekit_config(sources, stored, method, math), "out": str(root / "theirs")}
    costs: dict[str, list[Cost]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        costs["ours"].append(run_once(sys.executable, _OURS, ours, root / "figures.json"))
        costs["theirs"].append(run_once(mergekit_python, _THEIRS, theirs, root / "figures.json"))
    numbers, largest, differing = _differences(root / "ours", root / "theirs")
    agree = method != "dare_linear"
    return Comparison(
        stored=stored,
        method=method,
        mergekit_math=math,
        ours=_best(costs["ours"]),
        mergekit=_best(costs["theirs"]),
        numbers=numbers,
        largest_difference=largest if agree else None,
        differing=differing if agree else None,
    )


def _mergekit_config(sources: list[str], stored: str, method: str, math: str) -> dict[str, Any]:
    """The same merge in mergekit's words: deltas to the oldest, each of weight 1 (ties) or 1/n (dare)."""
    config: dict[str, Any] = {"merge_method": method, "dtype": math, "out_dtype": stored}
    merged = sources if method == "linear" else sources[1:]
    parameters: dict[str, float] = {"weight": 1 / len(merged) if method == "dare_linear" else 1.0}
    if method != "linear":
        config["base_model"] = sources[0]
        parameters["density"] = DENSITY
    config["models"] = [{"model": source, "parameters": parameters} for source in merged]
    return config


def _differences(one: Path, other: Path) -> tuple[int, float, int]:
    numbers, largest, differing = 0, 0.0, 0
    name = "model.safetensors"
    with safe_open(one / name, framework="pt") as ours, safe_open(other / name, framework="pt") as theirs:
        if set(ours.keys()) != set(theirs.keys()):
            raise RuntimeError("the two results do not hold the same tensors")
        for key in ours.keys():  # noqa: SIM118 - the handle is no dict
            a, b = ours.get_tensor(key), theirs.get_tensor(key)
            difference = (a.double() - b.double()).abs()
            unit = torch.finfo(a.dtype).eps * a.double().abs().max().item()
            numbers += a.numel()
            largest = max(largest, difference.max().item())
            differing += int((difference > unit).sum())
    return numbers, largest, differing


def _best(costs: list[Cost]) -> Cost:
    """The least of every figure: what disturbs a measurement only adds to it. Anonymous memory is sampled: the most."""
    return Cost(
        cpu_s=min(cost.cpu_s for cost in costs),
        merge_cpu_s=min(cost.merge_cpu_s for cost in costs),
        peak_bytes=min(cost.peak_bytes for cost in costs),
        merge_peak_bytes=min(cost.merge_peak_bytes for cost in costs),
        anonymous_peak_bytes=max(cost.anonymous_peak_bytes for cost in costs),
    )


def _anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)


def _mergekit_python(root: Path) -> str:
    """An environment with mergekit, torch and transformers as here."""
    python = root / "mergekit" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", root / "mergekit"], check=True)
    torch_version = torch.__version__.partition("+")[0]
    wanted = [MERGEKIT, f"torch=={torch_version}", f"transformers=={transformers.__version__}"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True, stdout=sys.stderr)
    return str(python)


def main() -> None:
    """Print the comparison as a table, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--mergekit-python", help="a Python that has mergekit; else one is made")
    parser.add_argument("--rounds", type=int, default=2, help="merges of each kind, of which the better counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        python = options.mergekit_python or _mergekit_python(root)
        make_checkpoints(root)
        found = []
        for case in CASES:
            found.append(compare(root, case, python, options.rounds))
            print(*case, file=sys.stderr)
    result = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "mergekit": MERGEKIT.partition("==")[2],
        },
        # the least favourable case counts
        "mergekit_time_ratio": min(case.mergekit.cpu_s / case.ours.cpu_s for case in found),
        "mergekit_memory_ratio": min(case.mergekit.peak_bytes / case.ours.peak_bytes for case in found),
        "mergekit_merge_time_ratio": min(case.mergekit.merge_cpu_s / case.ours.merge_cpu_s for case in found),
        "mergekit_merge_memory_ratio": min(
            case.mergekit.merge_peak_bytes / case.ours.merge_peak_bytes for case in found
        ),
        "cases": [asdict(case) for case in found],
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    _print(result, found)


def _print(result: dict[str, Any], found: list[Comparison]) -> None:
    console = Console()
    pairs = ("CPU s", "merge alone", "peak MiB", "merge alone", "anonymous")
    shown = Table("stored", "method", "math", *(f"{title}, ours / mergekit" for title in pairs), "differing")
    for case in found:
        ours, theirs = case.ours, case.mergekit
        shown.add_row(
            case.stored,
            case.method,
            case.mergekit_math,
            f"{ours.cpu_s:.1f} / {theirs.cpu_s:.1f}",
            f"{ours.merge_cpu_s:.2f} / {theirs.merge_cpu_s:.2f}",
            *(
                f"{one / 2**20:,.0f} / {other / 2**20:,.0f}"
                for one, other in (
                    (ours.peak_bytes, theirs.peak_bytes),
                    (ours.merge_peak_bytes, theirs.merge_peak_bytes),
                    (ours.anonymous_peak_bytes, theirs.anonymous_peak_bytes),
                )
            ),
            "" if case.differing is None else f"{case.differing:,} of {case.numbers:,}",
        )
    console.print(shown)
    console.print(*(f"{key} {value:.1f}" for key, value in result.items() if key.endswith("ratio")), sep=", ")


if __name__ == "__main__":
    main()
