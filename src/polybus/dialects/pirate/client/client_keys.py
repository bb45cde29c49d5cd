"""A client's CURVE keys: two files of one folder, as `polybus keys` writes them.

    client.key_secret    the client's own pair
    server.key           the public key of the bus

The default folder is `$XDG_CONFIG_HOME/polybus/keys`, or `~/.config/polybus/keys`. ZeroMQ is
imported when a key is read, so that locating the folder is fast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from polybus.dialects.pirate import client_id as identity
from polybus.errors import ConfigError

CLIENT_KEY_FILE: Final = "client.key_secret"
SERVER_KEY_FILE: Final = "server.key"
NOT_FOR_OTHERS: Final = 0o077


class ClientKeys(NamedTuple):
    """The keys in Z85, the encoding that ZeroMQ takes."""

    public: bytes
    secret: bytes
    server: bytes

    @property
    def client_id(self) -> bytes:
        from zmq.utils import z85

        return identity.fingerprint(z85.decode(self.public))


def keys_folder(environ: Mapping[str, str]) -> Path:
    home = environ.get("XDG_CONFIG_HOME")
    if not home and not environ.get("HOME"):
        raise ConfigError("no key folder: neither $HOME nor $XDG_CONFIG_HOME is set; pass a folder")
    configs = Path(home) if home else Path(environ["HOME"]) / ".config"
    return configs / "polybus" / "keys"


def load_keys(folder: Path) -> ClientKeys:
    own, bus = folder / CLIENT_KEY_FILE, folder / SERVER_KEY_FILE
    public, secret = _read(own, "create it with 'polybus keys new client'")
    if secret is None:
        raise ConfigError(f"{own} has no secret key")
    if own.stat().st_mode & NOT_FOR_OTHERS:
        raise ConfigError(f"{own} is readable by other users; run: chmod 600 {own}")
    server, _ = _read(bus, "copy it from the bus ('polybus keys ls' there prints its path)")
    return ClientKeys(public, secret, server)


def _read(path: Path, advice: str) -> tuple[bytes, bytes | None]:
    import zmq.auth

    if not os.path.lexists(path):
        raise ConfigError(f"{path} does not exist; {advice}")
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
