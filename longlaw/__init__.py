"""Longlaw from Python: `from longlaw import fit, Client`.

`fit` fits the law to observations in hand (`fitting.joint.fit`), `Client` talks to a running service. Both are imported
when first asked for, so that the command line starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fitting.joint import fit
    from longlaw.client import Client

__all__ = ["Client", "fit"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from longlaw.client import Client

        return Client
    if name == "fit":
        from fitting.joint import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
