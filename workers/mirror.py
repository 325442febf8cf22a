"""A store that lies elsewhere: a local folder that mirrors an fsspec URL, piece by piece, as pieces are needed.

Everything in a store is immutable under its name (checkpoints, corpora, models, reference losses), but for the names
of corpora. So a piece that is here needs no look there, and a mirror may be deleted at any time. Object stores cannot
rename: a folder counts as there once its `manifest.json` is, which is always sent last.
"""

from __future__ import annotations

import functools
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import fsspec

from workers.errors import StoreError
from workers.spec import content_hash

MANIFEST = "manifest.json"
_MARKER = ".mirror.json"


def open_store(url: str, *, cache: Path) -> Path:
    """The local root of the store at `url`: the folder itself, or below `cache` the mirror of an fsspec URL.

    Raises:
        StoreError: if no installed filesystem knows the URL.
    """
    if "://" not in url:
        root = Path(url).expanduser().absolute()
        root.mkdir(parents=True, exist_ok=True)
        return root
    _connect(url)
    root = cache.absolute() / content_hash(url)
    root.mkdir(parents=True, exist_ok=True)
    (root / _MARKER).write_text(json.dumps({"url": url.rstrip("/")}))
    return root


def is_mirror(store: Path) -> bool:
    """Whether the store's root mirrors a URL."""
    return (store / _MARKER).is_file()


def fetch(store: Path, relative: str, *, again: bool = False) -> None:
    """Brings a file, or a folder with a manifest, from the URL if it is not here; nothing happens in a plain folder.

    What is not at the URL either stays absent: whoever reads it says so.

    Args:
        again: Also if it is here: for what may change, or is damaged here.
    """
    url = _url(store)
    here = store / relative
    if url is None or (here.exists() and not again):
        return
    filesystem, root = _connect(url)
    there = f"{root}/{relative}"
    try:
        if filesystem.isdir(there):
            if not filesystem.exists(f"{there}/{MANIFEST}"):
                return
        elif not filesystem.isfile(there):
            return
        coming = here.with_name(f".{here.name}-{uuid.uuid4().hex}.unfinished")
        coming.parent.mkdir(parents=True, exist_ok=True)
        try:
            _get(filesystem, there, coming)
            if here.is_dir():
                shutil.rmtree(here)
            coming.rename(here)
        except OSError:
            if not here.exists():  # else another process of this machine was faster with the same bytes
                raise
        finally:
            shutil.rmtree(coming, ignore_errors=True)
    except Exception as error:  # filesystems raise what their libraries raise
        raise StoreError(f"{url}/{relative} cannot be read: {error}") from error


def publish(store: Path, relative: str) -> None:
    """Sends a file, or a folder with its manifest last, to the URL; nothing happens in a plain folder.

    Raises:
        StoreError: if the URL cannot be written.
    """
    url = _url(store)
    if url is None:
        return
    filesystem, root = _connect(url)
    here, there = store / relative, f"{root}/{relative}"
    try:
        if here.is_file():
            filesystem.makedirs(there.rpartition("/")[0], exist_ok=True)
            filesystem.put_file(str(here), there)
            return
        files = sorted(path for path in here.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path == here / MANIFEST):
            target = f"{there}/{path.relative_to(here).as_posix()}"
            filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
            filesystem.put_file(str(path), target)
    except Exception as error:
        raise StoreError(f"{url}/{relative} cannot be written: {error}") from error


def remove(store: Path, relative: str) -> None:
    """Removes a file or folder here and at the URL; what is not there is no error."""
    if (url := _url(store)) is not None:
        filesystem, root = _connect(url)
        there = f"{root}/{relative}"
        try:
            if filesystem.exists(f"{there}/{MANIFEST}"):
                filesystem.rm_file(f"{there}/{MANIFEST}")  # first, so that half a folder is never taken for a whole one
            if filesystem.exists(there):
                filesystem.rm(there, recursive=True)
        except Exception as error:
            raise StoreError(f"{url}/{relative} cannot be removed: {error}") from error
    here = store / relative
    shutil.rmtree(here, ignore_errors=True)
    if here.is_file():
        here.unlink()


def published_manifest(store: Path, relative: str) -> bytes | None:
    """The manifest of a folder as it lies at the URL; None where there is none, and in a plain folder."""
    url = _url(store)
    if url is None:
        return None
    filesystem, root = _connect(url)
    there = f"{root}/{relative}/{MANIFEST}"
    try:
        return bytes(filesystem.cat_file(there)) if filesystem.exists(there) else None
    except Exception as error:
        raise StoreError(f"{url}/{relative} cannot be read: {error}") from error


def names_in(store: Path, relative: str) -> tuple[str, ...]:
    """Names of what lies in a folder of the store, here or at the URL."""
    here = store / relative
    names = {path.name for path in here.iterdir()} if here.is_dir() else set()
    if (url := _url(store)) is not None:
        filesystem, root = _connect(url)
        there = f"{root}/{relative}"
        try:
            if filesystem.isdir(there):
                names |= {str(path).rstrip("/").rpartition("/")[2] for path in filesystem.ls(there, detail=False)}
        except Exception as error:
            raise StoreError(f"{url}/{relative} cannot be read: {error}") from error
    return tuple(sorted(names))


def _get(filesystem: Any, there: str, coming: Path) -> None:
    if not filesystem.isdir(there):
        filesystem.get_file(there, str(coming))
        return
    files = json.loads(filesystem.cat_file(f"{there}/{MANIFEST}"))["files"]
    # Those that the manifest names: others may lie there from an attempt that was killed while it sent something else.
    for name in (*(file["name"] if isinstance(file, dict) else file for file in files), MANIFEST):
        target = coming / name
        target.parent.mkdir(parents=True, exist_ok=True)
        filesystem.get_file(f"{there}/{name}", str(target))


def _url(store: Path) -> str | None:
    try:
        return str(json.loads((store / _MARKER).read_bytes())["url"])
    except FileNotFoundError:
        return None


@functools.lru_cache(maxsize=8)
def _connect(url: str) -> tuple[Any, str]:
    try:
        # A listing that is remembered hides what other machines have sent since.
        filesystem, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ValueError, ImportError) as error:
        raise StoreError(
            f"the store {url} cannot be opened: {error} (install the filesystem's package, such as s3fs or gcsfs)"
        ) from error
    return filesystem, str(root).rstrip("/")
