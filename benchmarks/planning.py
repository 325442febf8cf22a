"""How long a grid of 100,000 cells takes to lay out, and then to plan: beside nothing, and beside all of it.

``python -m benchmarks.planning [--json]`` prints and writes nothing. CPU seconds, since machines are shared.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.grid import Grid, parse_grid
from orchestrator.layout import lay_out
from orchestrator.plan import plan_of
from orchestrator.plan_document import plan_document
from orchestrator.plan_values import Known, KnownSegment, Plan

PROTOCOLS = ("constant", "linear_decay")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """CPU seconds for one grid."""

    protocol: str
    cells: int
    segments: int
    layout_cpu_s: float
    plan_cpu_s: float
    replan_cpu_s: float
    document_cpu_s: float


def large_grid(protocol: str) -> Grid:
    """2 scales x 50 D_s x 100 D_l x 10 long seeds."""
    document: dict[str, Any] = {
        "name": "large",
        "protocol": protocol,
        "scales": {
            f"d{width}": {"layers": 2, "width": width, "heads": 1, "ffn_width": 3 * width} for width in (32, 64)
        },
        "short_tokens": [1024 * steps for steps in range(200, 700, 10)],
        "long_tokens": [1024 * steps for steps in range(8, 408, 4)],
        "seeds": {"long": list(range(10))},
        "recipe": {
            "corpus": "0" * 32,
            "model": {"vocab_size": 512},
            "short": {"seq_len": 128, "batch_sequences": 8, "peak_rate": 0.01, "warmup_steps": 50},
            "long": {"seq_len": 1024, "batch_sequences": 1, "rope_base": 100_000},
        },
        "evaluation": {"reference": {"kind": "copy"}, "documents": {"count": 24, "length": 1024}},
    }
    if protocol == "constant":
        document["rules"] = [{"name": "last_m", "m": 4, "spacing": 1024}]
    return parse_grid(document)


def measure(protocol: str) -> Timing:
    """Lay the large grid out, plan it, plan it with all of it known, and render the plan."""
    grid = large_grid(protocol)
    started = time.process_time()
    layout = lay_out(grid)
    laid_out = time.process_time()
    planned = plan_of(layout, Known())
    fresh = time.process_time()
    again = plan_of(layout, _all_known(planned))
    replanned = time.process_time()
    assert again.tokens_train == 0
    plan_document(planned)
    return Timing(
        protocol=protocol,
        cells=len(planned.cells),
        segments=len(planned.segments),
        layout_cpu_s=laid_out - started,
        plan_cpu_s=fresh - laid_out,
        replan_cpu_s=replanned - fresh,
        document_cpu_s=time.process_time() - replanned,
    )


def _all_known(planned: Plan) -> Known:
    return Known(
        segments={segment.id: KnownSegment(saved_steps=frozenset(segment.save_steps)) for segment in planned.segments},
        evaluated=frozenset(evaluation.key for evaluation in planned.evaluations),
    )


def main() -> None:
    """Print the timings as a table, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    timings = [measure(protocol) for protocol in PROTOCOLS]
    if as_json:
        versions = {"python": platform.python_version()}
        print(json.dumps({"versions": versions, "timings": [asdict(timing) for timing in timings]}, indent=2))
        return
    shown = Table("CPU seconds", "cells", "segments", "layout", "plan", "all known", "as JSON values")
    for timing in timings:
        shown.add_row(
            timing.protocol,
            f"{timing.cells:,}",
            f"{timing.segments:,}",
            f"{timing.layout_cpu_s:.1f}",
            f"{timing.plan_cpu_s:.1f}",
            f"{timing.replan_cpu_s:.1f}",
            f"{timing.document_cpu_s:.1f}",
        )
    Console().print(shown)


if __name__ == "__main__":
    main()
