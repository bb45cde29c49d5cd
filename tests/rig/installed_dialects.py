"""The dialects whose folder exists: tests run in copies of the package without one of them."""

from __future__ import annotations

from importlib.util import find_spec


def has_dialect(name: str) -> bool:
    return find_spec(f"polybus.dialects.{name}") is not None


def of_installed(*listeners: str) -> tuple[str, ...]:
    """Return the `DIALECT=ADDRESS` arguments of dialects that exist."""
    return tuple(one for one in listeners if has_dialect(one.partition("=")[0]))
