"""`/`: the dashboard: files of ours, and plotly's script out of its Python package. Nothing comes from elsewhere."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Request, Response

from api import conditional
from api.errors import ResourceNotFoundError

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).parent.parent / "static"
_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_PLOTLY = "plotly.min.js"

#: No inline scripts, no eval, nothing from elsewhere. Plotly writes style elements and draws its PNGs from blobs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REVALIDATE = "no-cache"
_A_WEEK = "public, max-age=604800"


@router.get("/")
def dashboard(request: Request) -> Response:
    """The page."""
    answer = _file(request, _FOLDER / "index.html", cache=_REVALIDATE)
    answer.headers["Content-Security-Policy"] = _POLICY
    answer.headers["Referrer-Policy"] = "no-referrer"
    return answer


@router.get("/static/{name}")
def static_file(request: Request, name: str) -> Response:
    """A file of the page.

    Raises:
        ResourceNotFoundError: there is none of that name.
    """
    if name == _PLOTLY:
        return _file(request, _plotly_script(), cache=_A_WEEK)
    if name not in _names():
        raise ResourceNotFoundError(f"No resource at {request.url.path}.")
    return _file(request, _FOLDER / name, cache=_REVALIDATE)


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(path.name for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES)


@functools.cache
def _plotly_script() -> Path:
    """Where plotly's script lies; found without importing plotly, which takes its time."""
    spec = find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        raise ResourceNotFoundError("The chart needs the Python package plotly: install longlaw[api].")
    return Path(spec.submodule_search_locations[0]) / "package_data" / _PLOTLY


def _file(request: Request, path: Path, *, cache: str) -> Response:
    """A file's content, or a 304 where the browser has it already."""
    content, tag = _content(path, path.stat().st_mtime_ns)
    answer = conditional.answer(request, content, tag=tag, media_type=_MEDIA_TYPES[path.suffix], cache=cache)
    answer.headers["X-Content-Type-Options"] = "nosniff"
    return answer


@functools.lru_cache(maxsize=32)
def _content(path: Path, changed_ns: int) -> tuple[bytes, str]:
    """Content and strong ETag, kept until the file changes."""
    content = path.read_bytes()
    return content, conditional.entity_tag(content)
