"""`/docs`: the endpoints on one plain page, without a script from elsewhere. The contract itself is `/openapi.json`."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title} REST API</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
code {{ background: #8882; padding: .1rem .3rem; border-radius: .2rem; }}
table {{ border-collapse: collapse; margin: .5rem 0 1rem; }} td {{ padding: .1rem 1rem .1rem 0; vertical-align: top; }}
:root {{ color-scheme: light dark; }}
</style>
<h1>{title} {version}</h1><p>{description}</p>
<p>Machine-readable: <a href="/openapi.json">/openapi.json</a> (OpenAPI 3.1).</p>
{operations}
</html>"""


@router.get("/docs", response_class=HTMLResponse)
def docs(request: Request) -> str:
    """The endpoints, their parameters and what they answer."""
    schema: dict[str, Any] = request.app.openapi()
    operations = [
        _operation(verb, path, operation)
        for path, verbs in schema["paths"].items()
        for verb, operation in verbs.items()
    ]
    info = schema["info"]
    return _PAGE.format(
        title=escape(info["title"]),
        version=escape(info["version"]),
        description=escape(info["description"]),
        operations="\n".join(operations),
    )


def _operation(verb: str, path: str, operation: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(item['name'])}</code></td><td>{escape(item['in'])}</td>"
        f"<td>{escape(item.get('description', ''))}</td></tr>"
        for item in operation.get("parameters", ())
    )
    return (
        f"<h2><code>{escape(verb.upper())} {escape(path)}</code></h2>"
        f"<p>{escape(operation.get('description', ''))}</p><table>{rows}</table>"
    )
