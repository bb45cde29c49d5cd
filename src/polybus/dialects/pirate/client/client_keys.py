"""A client's CURVE keys: files as `polybus keys` writes them, in one folder.

    client.key_secret    the client's own pair
    server.key           the public key of the bus

ZeroMQ is loaded when a key is read: where the keys are is known without it.

The default folder is `$XDG_CONFIG_HOME/polybus/keys`, else `~/.config/polybus/keys`.
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
    """As ZeroMQ wants them: in Z85."""

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
        raise ConfigError("no folder of keys: neither $HOME nor $XDG_CONFIG_HOME is set; give one")
    configs = Path(home) if home else Path(environ["HOME"]) / ".config"
    return configs / "polybus" / "keys"


def load_keys(folder: Path) -> ClientKeys:
    own, bus = folder / CLIENT_KEY_FILE, folder / SERVER_KEY_FILE
    public, secret = _read(own, "make it with 'polybus keys new client'")
    if secret is None:
        raise ConfigError(f"{own} has no secret key")
    if own.stat().st_mode & NOT_FOR_OTHERS:
        raise ConfigError(f"{own} can be read by other users: chmod 600 {own}")
    server, _ = _read(bus, "copy it from the bus: 'polybus keys ls' there says where it is")
    return ClientKeys(public, secret, server)


def _read(path: Path, advice: str) -> tuple[bytes, bytes | None]:
    import zmq.auth

    if not os.path.lexists(path):
        raise ConfigError(f"{path} is not there: {advice}")
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
