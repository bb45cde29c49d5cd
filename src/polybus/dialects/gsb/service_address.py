"""Services and the addresses of calls.

    greeter          /local/greeter          a service of this node
    greeter/many                             the same, if only `greeter` is registered
    /net/0x…/greeter       0x…/greeter       a service of the node with this id

A service name is segments of letters, digits, `_`, `.` and `-`, joined by `/`. An address
resolves to the longest registered name that is a prefix of it, ending at a `/`. Names whose
first segment is `local`, `net`, `sys` or a node id cannot be registered: as addresses they
would be ambiguous.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from polybus.errors import MalformedRequest
from polybus.model.identity import is_node_id

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S")

MAX_SERVICE_BYTES = 255
MAX_REQUEST_ID_BYTES = 255  # an id is a key of a table and is sent back with each reply
# Of an address that resolves to nothing, the log has this much. A valid one is shorter.
MAX_LOGGED_ADDRESS_BYTES = 512
# The beginning of an address of this node, and of another one.
LOCAL, NET = "/local/", "/net/"
BUILT_IN = "sys"
RESERVED = frozenset({"local", "net", BUILT_IN})
# The bus's own services for other nodes.
RESERVED_PUBLIC = "public/gsb"
PUBLIC_PING, PUBLIC_ACL = "public/gsb/ping", "public/gsb/acl"
PUBLIC_CHANNEL = "public/gsb/channel"

_SEGMENT = r"[A-Za-z0-9_.-]{1,64}"
_SERVICE = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")


class StatusCode(IntEnum):
    """The result of a call, a registration or a subscription."""

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
    """A parsed address: a service of this node, or of the named node."""

    service: str
    node: str | None = None


def check_service_name(name: str) -> None:
    """Raise `MalformedRequest` if no client may register this name."""
    _check_grammar(name, name)
    first = name.partition("/")[0]
    if first in RESERVED:
        raise MalformedRequest(f"{name!r}: names that begin with {first!r} are reserved")
    if name == RESERVED_PUBLIC or name.startswith(f"{RESERVED_PUBLIC}/"):
        raise MalformedRequest(f"{name!r}: names that begin with {RESERVED_PUBLIC!r} are reserved")
    if is_node_id(first):
        raise MalformedRequest(f"{name!r}: names that begin with a node id are reserved")


def parse_address(address: str) -> ServiceAddress:
    """Return the parsed address. Raises `MalformedRequest` if it is not one."""
    name, node = address, None
    if address.startswith(LOCAL):
        name = address.removeprefix(LOCAL)
    elif address.startswith(NET):
        node, _, name = address.removeprefix(NET).partition("/")
        if not is_node_id(node):
            raise MalformedRequest(
                f"{_quoted(address)}: {NET} must be followed by a node id: 0x and 40 hex digits,"
                " in lower case"
            )
    elif is_node_id(address.partition("/")[0]):
        node, _, name = address.partition("/")
    if node is not None and not name:
        raise MalformedRequest(f"{_quoted(address)} must have a service after the node id")
    _check_grammar(address, name)
    return ServiceAddress(name, node)


def resolve_service(services: Mapping[str, S], name: str) -> S | None:
    """Return the service with the longest registered name that is a prefix of `name`."""
    while name:
        service = services.get(name)
        if service is not None:
            return service
        name = name.rpartition("/")[0]
    return None


def _check_grammar(whole: str, name: str) -> None:
    """Check the service name of `whole`, an address or the name itself."""
    if len(name) > MAX_SERVICE_BYTES:
        raise MalformedRequest(f"{_quoted(whole)} must have at most {MAX_SERVICE_BYTES} bytes")
    if not _SERVICE.fullmatch(name):
        raise MalformedRequest(
            f"{_quoted(whole)} must be segments of [A-Za-z0-9_.-], at most 64 each, joined by '/'"
        )


def _quoted(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."
