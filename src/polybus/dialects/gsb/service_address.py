"""Services and the addresses of calls.

    greeter          /local/greeter          a service of this node
    greeter/many                             the same, if only `greeter` is registered
    /net/0x…/greeter       0x…/greeter       a service of the node with this id

A service's name is segments of letters, digits, `_`, `.` and `-`, joined by `/`. An
address finds the longest registered name that it begins with, at a `/`. The first
segments `local`, `net`, `sys` and whatever is shaped like a node's id are not for
registering: an address could mean something else by them.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

from polybus.errors import MalformedRequest

MAX_SERVICE_BYTES = 255
MAX_REQUEST_ID_BYTES = 255  # an id is a key in a table, not a message
# What is told of an address that leads nowhere; one that leads somewhere is shorter.
MAX_LOGGED_ADDRESS_BYTES = 512
BUILT_IN = "sys"
RESERVED = frozenset({"local", "net", BUILT_IN})

_SEGMENT = r"[A-Za-z0-9_.-]{1,64}"
_SERVICE = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
_NODE = re.compile(r"0x[0-9a-f]{40}")


class StatusCode(IntEnum):
    """What became of a call, a registration or a subscription."""

    OK = 0
    BAD_REQUEST = 400
    DENIED = 403
    NOT_FOUND = 404
    CONFLICT = 409
    TOO_LARGE = 413
    CANCELLED = 499
    FAILURE = 500
    UNAVAILABLE = 503
    DEADLINE = 504


class ServiceAddress(NamedTuple):
    """What an address means: a service of this node, or of the node that is named."""

    service: str
    node: str | None = None


def is_node_id(text: str) -> bool:
    return _NODE.fullmatch(text) is not None


def check_service_name(name: str) -> None:
    """`MalformedRequest` if nobody may register this."""
    _check_grammar(name, name)
    first = name.partition("/")[0]
    if first in RESERVED:
        raise MalformedRequest(f"{name!r}: names that begin with {first!r} are the bus's own")
    if is_node_id(first):
        raise MalformedRequest(f"{name!r} begins like a node's id")


def parse_address(address: str) -> ServiceAddress:
    """What an address means, or `MalformedRequest` if it is none."""
    if address.startswith("/local/"):
        return ServiceAddress(_checked_name(address, address.removeprefix("/local/")))
    if address.startswith("/net/"):
        node, _, service = address.removeprefix("/net/").partition("/")
        if not is_node_id(node):
            raise MalformedRequest(f"{_quoted(address)}: /net/ is followed by a node's id")
        return ServiceAddress(_checked_name(address, service), node)
    first, _, rest = address.partition("/")
    if is_node_id(first):
        return ServiceAddress(_checked_name(address, rest), first)
    return ServiceAddress(_checked_name(address, address))


def _checked_name(address: str, service: str) -> str:
    _check_grammar(address, service)
    return service


def _check_grammar(whole: str, name: str) -> None:
    if len(name) > MAX_SERVICE_BYTES:
        raise MalformedRequest(f"{_quoted(whole)} is longer than {MAX_SERVICE_BYTES} bytes")
    if not _SERVICE.fullmatch(name):
        raise MalformedRequest(
            f"{_quoted(whole)} is not segments of [A-Za-z0-9_.-], at most 64 each, joined by '/'"
        )


def _quoted(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."
