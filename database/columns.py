"""What the tables are made of: their base, the types of their columns, and the checks that several of them share."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

from sqlalchemy import BigInteger, Boolean, DateTime, Double, Identity, MetaData, Text, Uuid, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


def one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def finite(*columns: str) -> str:
    """Postgres stores NaN and sorts it above every number: one would spoil each maximum and mean."""
    return " AND ".join(f"{column} NOT IN ('NaN', 'Infinity', '-Infinity')" for column in columns)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads this class attribute
        str: Text(),
        int: BigInteger(),
        float: Double(),
        bool: Boolean(),
        dt.datetime: DateTime(timezone=True),
        uuid.UUID: Uuid(),
        dict[str, Any]: JSONB(),
        list[Any]: JSONB(),
    }


def identity() -> Mapped[int]:
    return mapped_column(BigInteger, Identity(always=True), primary_key=True)


def created() -> Mapped[dt.datetime]:
    return mapped_column(server_default=func.now())
