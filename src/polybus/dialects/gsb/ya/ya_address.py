"""Names and addresses of the deployed bus, as those of this one.

    there              here
    /local/x           x               x must not begin with `public/`
    /public/x          public/x
    /net/0x…/x         /net/0x…/public/x    only public services are visible to other nodes
    x                  x               its own examples use such names

Two texts of the first three rows never mean the same here, so each name has one form there. A
service gets the addresses of its calls in the form in which it was registered.
"""

from __future__ import annotations

from polybus.dialects.gsb.server.service_registry import PUBLIC
from polybus.dialects.gsb.service_address import LOCAL, NET
from polybus.errors import MalformedRequest


def to_native(address: str) -> str:
    """Return an address, or a service name, as the rest of the bus has it.

    Raises `MalformedRequest` for one that begins with a `/` and has no such form. The grammar of
    the rest is not checked here.
    """
    if address.startswith(LOCAL):
        name = address.removeprefix(LOCAL)
        if name.startswith(PUBLIC):
            raise MalformedRequest(
                f"{address[:80]!r} must begin with /{PUBLIC}, not {LOCAL}{PUBLIC}"
            )
        return name
    if address.startswith(f"/{PUBLIC}"):
        return address.removeprefix("/")
    if address.startswith(NET):
        node, slash, name = address.removeprefix(NET).partition("/")
        return f"{NET}{node}{slash}{PUBLIC}{name}" if name else address
    if address.startswith("/"):
        raise MalformedRequest(
            f"{address[:80]!r} must begin with {LOCAL}, /{PUBLIC} or {NET} and a node id"
        )
    return address
