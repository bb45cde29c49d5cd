"""Requests of commands to the admin socket of a running bus: one at a time, blocking."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polybus.errors import (
    ConnectionLost,
    Denied,
    InvalidRule,
    LimitReached,
    NotConnected,
    PeerError,
    PolybusError,
    Refused,
    Unavailable,
    UsageError,
)
from polybus.model.socket_path import find_socket

# The bus answers within one turn of its loop; a machine that is swapping gets some more.
TIMEOUT_S = 10.0
# A line for each of a million connections.
MAX_ANSWER_BYTES = 512 * 1024 * 1024
# Error code of the bus → exception raised here.
ERRORS: Mapping[str, type[PolybusError]] = {
    "denied": Denied,
    "refused": Refused,
    "not_found": Refused,
    "invalid_rule": InvalidRule,
    "unavailable": Unavailable,
    "bad_request": UsageError,
    "unknown_verb": UsageError,
    "too_large": UsageError,
}


def default_path(environ: Mapping[str, str]) -> Path:
    """Return the admin socket of this user's bus, else that of root's."""
    return find_socket("admin.sock", environ)


def ask(path: Path, verb: str, timeout_s: float = TIMEOUT_S, **keys: Any) -> Any:
    """Send a request and return its answer. Raises one of `polybus.errors`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        _connect(connection, path)
        try:
            connection.sendall(json.dumps({"verb": verb, **keys}).encode() + b"\n")
            line = _read_line(connection)
        except TimeoutError:
            raise ConnectionLost(
                f"the bus at unix:{path} gave no answer in {timeout_s:g} s"
            ) from None
        except OSError as error:
            raise ConnectionLost(
                f"the bus at unix:{path} closed the connection: {error.strerror}"
            ) from None
    try:
        answer = json.loads(line)
        if "ok" in answer:
            return answer["ok"]
        code, text = str(answer["error"]["code"]), str(answer["error"]["text"])
    except (ValueError, KeyError, TypeError):
        raise PeerError(
            f"invalid answer from unix:{path}: it is not the admin socket of a bus"
        ) from None
    if code == "limit_reached":
        raise LimitReached("max_admin_connections", text)
    raise ERRORS.get(code, PeerError)(text)


def ask_pages(path: Path, verb: str, field: str, **keys: Any) -> list[Any]:
    """Send requests until the last page. Returns the rows of all pages."""
    rows: list[Any] = []
    while True:
        page = ask(path, verb, **keys)
        rows += page[field]
        if page["next"] is None:
            return rows
        keys["after"] = page["next"]


def _connect(connection: socket.socket, path: Path) -> None:
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        raise NotConnected(
            f"no bus answers at unix:{path}: start one with 'polybus serve'"
        ) from None
    except PermissionError:
        raise Denied(f"unix:{path} is not for this user") from None
    except TimeoutError:
        raise NotConnected(f"the bus at unix:{path} does not answer") from None
    except OSError as error:
        raise NotConnected(f"unix:{path}: {error.strerror or error}") from None


def _read_line(connection: socket.socket) -> bytes:
    chunks = bytearray()
    while not chunks.endswith(b"\n"):
        data = connection.recv(1024 * 1024)
        if not data:
            raise ConnectionLost("the bus closed the connection before the end of its answer")
        chunks += data
        if len(chunks) > MAX_ANSWER_BYTES:
            raise PeerError("the answer of the bus has no end")
    return bytes(chunks)
