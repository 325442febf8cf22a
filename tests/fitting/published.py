"""Published tables of (N, D, loss)."""

from pathlib import Path

import pandas as pd

from fitting.observations import Columns, Observations, observations_from_table

DATA = Path(__file__).parents[1] / "data"
ONE_STAGE = Columns(n_params="N", short_tokens=None, long_tokens="D", log_longppl="loss")


def epoch() -> Observations:
    """The 240 rows that Epoch's fit uses."""
    table = pd.read_csv(DATA / "epoch_chinchilla.csv")
    return observations_from_table(table[table.excluded_by_epoch == 0], columns=ONE_STAGE)


def gemstones() -> Observations:
    """199 checkpoints after cooldown."""
    return observations_from_table(pd.read_csv(DATA / "gemstones_cooldown.csv"), columns=ONE_STAGE)
