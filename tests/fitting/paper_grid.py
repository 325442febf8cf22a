"""The synthetic table of the paper's grid, and its certified optima."""

from pathlib import Path

import pandas as pd

from fitting.observations import Columns, Observations, observations_from_table

TABLE = Path(__file__).parents[1] / "data" / "synthetic_paper_grid.csv"


def paper_grid(column: str, *, held_out: bool = False) -> Observations:
    """One noise kind of the table: S1-S4, or the held-out S5."""
    table = pd.read_csv(TABLE)
    columns = Columns(n_params="N", short_tokens="Ds", long_tokens="Dl", log_longppl=column)
    return observations_from_table(table[table.held_out == int(held_out)], columns=columns)
