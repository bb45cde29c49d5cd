"""The bus that a client command means, and what is said if it is not there.

Found by `--bus`, `$POLYBUS_URL`, or at its default port. A command asks once, and
fails at once if no bus answers; what has begun waits for a bus that restarts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from polybus.native import Client, ClientOptions
    from polybus.native import bus_client as buses

BUS = "The bus; else $POLYBUS_URL, else polybus://127.0.0.1:6570."
Bus = Annotated[str | None, typer.Option("--bus", metavar="URL", help=BUS)]


def connect_once(bus: str | None) -> Client:
    """A client for one question."""
    from polybus.native import Client, ClientOptions, bus_url

    return Client(bus_url(bus, os.environ), ClientOptions(connect_timeout_s=0.0))


@contextmanager
def open_bus_or_store(bus: str | None, **patience: Any) -> Iterator[buses.BusClient]:
    """The same, or a bus in this process on a store that no other process owns.

    With `patience` it is for long work: a running bus is there now, and waited for later.
    """
    from polybus.native import ClientOptions, bus_url
    from polybus.native import bus_client as buses
    from polybus.store.engine_registry import find_store, has_files

    url = bus_url(bus, os.environ)
    if has_files(url):
        find_store(url)  # a mistyped path must not create a store
    if patience:
        check_reachable(url)
    reached = buses.connect(url, ClientOptions(**patience or {"connect_timeout_s": 0.0}))
    try:
        yield reached
    finally:
        reached.close()


def connect_waiting(bus: str | None, **patience: Any) -> Client:
    """A client for long work, to a bus that is there now."""
    from polybus.native import Client, ClientOptions, bus_url

    with connect_once(bus) as first:
        first.topics("")
    return Client(bus_url(bus, os.environ), ClientOptions(**patience))


def check_reachable(bus: str | None, **patience: Any) -> tuple[str, ClientOptions]:
    """For FDQ's clients, whose bus may be inside the process.

    A running one is there now.
    """
    from polybus.native import ClientOptions, bus_url
    from polybus.native.bus_client import is_in_process

    url = bus_url(bus, os.environ)
    if not is_in_process(url):
        with connect_once(url) as first:
            first.topics("")
    return url, ClientOptions(**patience)
