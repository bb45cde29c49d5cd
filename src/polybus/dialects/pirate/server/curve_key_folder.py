"""CURVE keys on disk: the bus's own pair, and the allowed keys of clients.

    <folder>/server.key, server.key_secret    the bus's own pair; created on first use
    <folder>/allowed/NAME.key                 a client's public key, `key:NAME` in rules

The files have the format of `zmq.auth`. The folder is the list of allowed keys: a user who can
write to it can allow and revoke keys, and a running bus applies changes within a second.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from polybus.dialects.pirate import client_id
from polybus.errors import AlreadyExists, ConfigError, DoesNotExist, UsageError

SERVER_KEY_NAME: Final = "server"
ALLOWED: Final = "allowed"
PUBLIC, SECRET = ".key", ".key_secret"
KEY_BYTES: Final = 32
KEY_CHARS: Final = 40  # in Z85
NOT_FOR_OTHERS: Final = 0o077
MAX_KEYS: Final = 65_536
# A name is a file name and a word in rules, so it must be valid as both.
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}")

# For each file: name, inode, size and modification time.
FolderFingerprint = frozenset[tuple[str, int, int, int]]


class CurveKeyPair(NamedTuple):
    """A key pair in Z85, the encoding that ZeroMQ takes."""

    public: bytes
    secret: bytes


class AllowedKey(NamedTuple):
    name: str
    key: bytes  # its 32 bytes

    @property
    def fingerprint(self) -> str:
        """The client id, in hex."""
        return client_id.fingerprint(self.key).hex()

    @property
    def text(self) -> str:
        from zmq.utils import z85

        return z85.encode(self.key).decode()


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a new pair to two files. Returns the public and the secret path.

    Raises `AlreadyExists` if one of the files exists.
    """
    import zmq  # here and below: `--help` must not import ZeroMQ

    _check_name(name)
    _make_folder(folder)
    public, secret = zmq.curve_keypair()
    paths = folder / (name + PUBLIC), folder / (name + SECRET)
    for path in paths:
        if os.path.lexists(path):
            raise AlreadyExists(f"{path} already exists; choose another name or remove it")
    _write(paths[1], _text(public, secret), 0o600)
    _write(paths[0], _text(public), 0o644)
    return paths


def read_public(path: Path) -> bytes:
    """Return the 32 bytes of the public key in a file. Raises `ConfigError`."""
    public, _ = _load(path)
    try:
        key = _decoded(public)
    except ValueError as error:
        raise ConfigError(f"cannot read a key from {path}: {error}") from None
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{path}: a key must have {KEY_BYTES} bytes, got {len(key)}")
    return key


def parse_key(text: str) -> bytes:
    """Return the 32 bytes of a public key in Z85. Raises `UsageError`."""
    try:
        key = _decoded(text.encode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"invalid key {text[:64]!r}: a key has {KEY_CHARS} characters in Z85")
    return bytes(key)


class CurveKeyFolder:
    """The key folder of a bus."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.allowed_folder = folder / ALLOWED

    @property
    def own_public(self) -> Path:
        return self.folder / (SERVER_KEY_NAME + PUBLIC)

    def load_own_pair(self) -> CurveKeyPair:
        """Return the pair of the bus. Creates it if there is none."""
        secret = self.folder / (SERVER_KEY_NAME + SECRET)
        if not os.path.lexists(secret):
            self.own_public.unlink(missing_ok=True)  # useless without its secret
            make_pair(self.folder, SERVER_KEY_NAME)
        if secret.stat().st_mode & NOT_FOR_OTHERS:
            raise ConfigError(f"{secret} is readable by other users; run: chmod 600 {secret}")
        public, private = _load(secret)
        if private is None:
            raise ConfigError(f"{secret} has no secret key")
        return CurveKeyPair(public, private)

    def allowed(self) -> list[AllowedKey]:
        """Return the allowed keys, sorted by name. Raises `ConfigError` if one is invalid."""
        if not self.allowed_folder.is_dir():
            return []
        paths = sorted(self.allowed_folder.glob("*" + PUBLIC))
        if len(paths) > MAX_KEYS:
            raise ConfigError(f"{self.allowed_folder} has more than {MAX_KEYS} keys")
        return [AllowedKey(path.name.removesuffix(PUBLIC), read_public(path)) for path in paths]

    def allow(self, key: bytes, name: str) -> AllowedKey:
        _check_name(name)
        for other in self.allowed():
            if other.key == key:
                raise AlreadyExists(f"this key is already allowed as {other.name!r}")
            if other.name == name:
                raise AlreadyExists(f"{name!r} is the name of another key; choose another name")
        _make_folder(self.allowed_folder)
        new = AllowedKey(name, key)
        _write(self.allowed_folder / (name + PUBLIC), _text(new.text.encode()), 0o644)
        return new

    def revoke(self, which: str) -> AllowedKey:
        """Revoke a key by name, fingerprint or the key itself. Raises `DoesNotExist`."""
        for key in self.allowed():
            if which in (key.name, key.fingerprint, key.text):
                (self.allowed_folder / (key.name + PUBLIC)).unlink()
                return key
        raise DoesNotExist(f"no key {which!r} is allowed; see 'polybus keys ls'")

    def read_fingerprint(self) -> FolderFingerprint:
        """Return a value that changes when a key is allowed, revoked or replaced."""
        with contextlib.suppress(OSError), os.scandir(self.allowed_folder) as files:
            stats = [(file.name, file.stat()) for file in files]
            return frozenset((name, at.st_ino, at.st_size, at.st_mtime_ns) for name, at in stats)
        return frozenset()


def _load(path: Path) -> tuple[bytes, bytes | None]:
    """Return the public and secret key of a file, in Z85."""
    import zmq.auth

    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a key from {path}: {error}") from None


def _decoded(text: bytes) -> bytes:
    """Decode Z85. Raises ValueError."""
    from zmq.utils import z85

    try:
        return bytes(z85.decode(text))
    except (KeyError, IndexError) as error:
        raise ValueError(f"not Z85: {error}") from None


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(f"invalid key name {name[:64]!r}: use letters, digits and _.@-")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {folder}: {error.strerror}") from None


def _text(public: bytes, secret: bytes | None = None) -> str:
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str, mode: int) -> None:
    """Write a file atomically. Never overwrites another file."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
