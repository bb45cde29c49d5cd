"""Engines by URL scheme, found by the entry-point group `polybus.engines`.

    [project.entry-points."polybus.engines"]
    memory = "polybus.store.memory.memory_engine:MemoryEngine"

The built-in engines use the same group as engines of other distributions. An engine is
imported when a URL names it, so a program that uses `memory:` does not load the others.
An entry point that cannot be loaded is logged and skipped.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from polybus.errors import AddressError, UsageError
from polybus.store.engine import (
    COMMIT_INTERVAL_MS,
    Durability,
    Maintenance,
    StoreEngine,
    StoreOptions,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from polybus.store.contract import Store

GROUP = "polybus.engines"
OWN_DISTRIBUTION = "polybus"

_log = logging.getLogger("polybus.store")


class StoreLocation(NamedTuple):
    """The folder of an existing store, and the engine that wrote it."""

    url: str
    folder: Path
    maintenance: Maintenance


def open_store(
    url: str,
    *,
    read_only: bool = False,
    durability: Durability = "fsync",
    commit_interval_ms: int = COMMIT_INTERVAL_MS,
    wall_ns: Callable[[], int] = time.time_ns,
) -> Store:
    """Open the store that a URL names. Raises `AddressError` if no engine accepts the URL."""
    if durability not in get_args(Durability):
        raise UsageError(f"durability must be 'fsync' or 'interval', got {durability!r}")
    if commit_interval_ms < 1:
        raise UsageError(f"commit_interval_ms must be at least 1, got {commit_interval_ms}")
    engine, place = _split(url)
    return engine.open(place, StoreOptions(read_only, durability, commit_interval_ms, wall_ns))


def schemes() -> tuple[str, ...]:
    """Return the schemes of all registered engines."""
    return tuple(_entry_points())


def is_store_url(text: str) -> bool:
    """Return True if the text is a URL of a registered engine."""
    scheme, colon, _ = text.partition(":")
    # A bus is the common case: the list of distributions need not be read for it.
    return bool(colon) and scheme != "polybus" and scheme in _entry_points()


def has_files(text: str) -> bool:
    """Return True if the text is a URL of an engine that keeps files."""
    return is_store_url(text) and _split(text)[0].maintenance is not None


def absolute_url(url: str) -> str:
    """Return a store URL in a form that does not depend on the working directory."""
    engine, place = _split(url)
    return f"{url.partition(':')[0]}:{engine.absolute(place)}"


def canonical_url(url: str) -> str:
    """Return the same URL for all URLs that name the same store."""
    engine, place = _split(url)
    return f"{url.partition(':')[0]}:{engine.canonical(place)}"


def default_url(data: Path) -> str:
    """Return the URL of the store of a bus whose configuration names no engine."""
    # An engine that cannot be loaded is skipped: another one may be the default.
    for scheme in schemes():
        engine = _load(scheme)
        if engine is not None and engine.is_default:
            return f"{scheme}:{engine.default_place(data)}"
    raise UsageError("no default engine is installed; set the engine of the bus")


def find_store(text: str, *, damaged: bool = False) -> StoreLocation:
    """Find an existing store by its URL, its folder or the data folder of a bus.

    If `damaged`, data that can be salvaged counts as a store. Raises `UsageError` if there
    is no such store, or if its engine keeps no files.
    """
    scheme, colon, place = text.partition(":")
    # A text with "//" is a URL of something else, not a folder with a colon in its name.
    named = bool(colon) and (scheme in _entry_points() or place.startswith("//"))
    found = {name: engine for name in schemes() if (engine := _load(name)) is not None}
    files = {name: engine for name, engine in found.items() if engine.maintenance is not None}
    if named and scheme not in files:
        forms = ", ".join(f"{name}:PATH" for name in files)
        raise UsageError(f"{text} has no files; give {forms} or a folder")
    folder = Path(place if named else text).absolute()
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give the folder of a store or of a bus")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UsageError(f"cannot read {folder}: permission denied")
    for name, engine in files.items():
        maintenance = engine.maintenance
        if maintenance is None or (named and name != scheme):
            continue
        for candidate in (folder, Path(engine.default_place(folder))):
            if maintenance.recognises(candidate, damaged=damaged):
                return StoreLocation(f"{name}:{candidate}", candidate, maintenance)
    raise UsageError(f"no store in {folder}; give the folder of a store or of a bus")


def _split(url: str) -> tuple[StoreEngine, str]:
    """Return the engine of a URL and the place. Raises `AddressError` if there is none."""
    scheme, colon, place = url.partition(":")
    engine = _load(scheme) if colon and scheme in _entry_points() else None
    if engine is None:
        known = ", ".join(f"{name}:" for name in schemes()) or "none"
        raise AddressError(f"no engine for {url!r}; installed engines: {known}")
    return engine, place


@cache
def _entry_points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # slow, and only store URLs need it

    def is_foreign(point: EntryPoint) -> bool:
        return point.dist is None or point.dist.name != OWN_DISTRIBUTION

    found: dict[str, EntryPoint] = {}
    # Ours come first: no other distribution replaces a built-in engine by accident.
    for point in sorted(entry_points(group=GROUP), key=is_foreign):
        if found.setdefault(point.name, point) is not point:
            _log.warning("engine %s: ignored %s: registered twice", point.name, point.value)
    return found


@cache
def _load(scheme: str) -> StoreEngine | None:
    point = _entry_points()[scheme]
    try:
        engine: StoreEngine = point.load()()
    except Exception as error:
        _log.warning("engine %s: cannot load %s: %s", scheme, point.value, error)
        return None
    return engine
