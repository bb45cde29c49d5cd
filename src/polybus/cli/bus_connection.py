"""The bus that a client command connects to.

`--bus`, then `$POLYBUS_URL`, then the default port. A command fails at once if no bus
answers at its start; a command that is already running waits for a bus that restarts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from polybus.native import Client, ClientOptions

BUS = "URL of the bus. [default: $POLYBUS_URL, or polybus://127.0.0.1:6570]"
Bus = Annotated[str | None, typer.Option("--bus", metavar="URL", help=BUS)]


def connect_once(bus: str | None) -> Client:
    """Return a client that does not wait for a bus."""
    from polybus.native import Client, ClientOptions, bus_url

    return Client(bus_url(bus, os.environ), ClientOptions(connect_timeout_s=0.0))


@contextmanager
def open_bus_or_store(bus: str | None, **options: Any) -> Iterator[Client]:
    """Connect to a bus, or open a store that no other process owns.

    With client options the command is long-running: the bus must answer now, and the client
    waits for it later.
    """
    from polybus.native import ClientOptions, bus_url
    from polybus.native import bus_client as buses
    from polybus.store.engine_registry import find_store, has_files

    url = bus_url(bus, os.environ)
    if has_files(url):
        find_store(url)  # a mistyped path must not create a store
    if options:
        check_reachable(url)
    client = buses.connect(url, ClientOptions(**options or {"connect_timeout_s": 0.0}))
    try:
        yield client
    finally:
        client.close()


def connect_waiting(bus: str | None, **options: Any) -> Client:
    """Return a client for a long-running command. Raises NotConnected if no bus answers now."""
    from polybus.native import Client, ClientOptions, bus_url

    with connect_once(bus) as first:
        first.topics("")
    return Client(bus_url(bus, os.environ), ClientOptions(**options))


def check_reachable(bus: str | None, **options: Any) -> tuple[str, ClientOptions]:
    """Return the URL and options for a client whose bus may be inside the process.

    Raises NotConnected if the URL is that of a running bus and it does not answer now.
    """
    from polybus.native import ClientOptions, bus_url
    from polybus.native.bus_client import is_in_process

    url = bus_url(bus, os.environ)
    if not is_in_process(url):
        with connect_once(url) as first:
            first.topics("")
    return url, ClientOptions(**options)
