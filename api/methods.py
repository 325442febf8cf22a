"""HTTP methods where the framework looks at one route at a time: HEAD, and what `Allow` names."""

from __future__ import annotations

from fastapi import Request
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def allowed_methods(request: Request) -> str:
    """`Allow` for the request's path: the methods of all routes that have it (RFC 9110, 10.2.1)."""
    found = [
        method
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]
    return ", ".join(sorted([*found, "HEAD"] if "GET" in found else found))


class HeadLikeGet:
    """Answers HEAD with the headers that GET would have, and no body (RFC 9110, 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self.app({**scope, "method": "GET"}, receive, without_body)
