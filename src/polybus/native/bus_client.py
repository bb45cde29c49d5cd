"""The bus of FDQ's clients: a running bus by its URL, or one in this process.

Clients call `connect` of this module at run time, so that tests can replace it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from polybus.store.engine_registry import is_store_url

if TYPE_CHECKING:
    from polybus.native import Client, ClientOptions

__all__ = ["connect", "is_in_process"]


def connect(url: str | None = None, options: ClientOptions | None = None) -> Client:
    """Return a client of a URL; without one of `$POLYBUS_URL`, else of the default port.

    `options` apply to a running bus only.
    """
    from polybus.native.client.native_options import bus_url

    target = bus_url(url, os.environ)
    if is_in_process(target):
        from polybus.native.inprocess import open_bus

        return open_bus(target)
    from polybus.native import Client

    return Client(target, options)


def is_in_process(url: str) -> bool:
    """Return whether a URL names a bus inside this process."""
    return is_store_url(url)
