"""CURVE keys on disk: the bus's own pair, and whom it lets in.

    <folder>/server.key, server.key_secret    the bus's own; made when first needed
    <folder>/allowed/NAME.key                 a client's public key: it is `key:NAME`

The files are those of `zmq.auth`. What is allowed is what is in the folder: whoever can
write there can let in and revoke, and a running bus notices it within a second.
"""

from __future__ import annotations

import contextlib
import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from polybus.errors import AlreadyExists, ConfigError, DoesNotExist, UsageError

SERVER_KEY_NAME: Final = "server"
ALLOWED: Final = "allowed"
PUBLIC, SECRET = ".key", ".key_secret"
KEY_BYTES: Final = 32
KEY_CHARS: Final = 40  # in Z85
FINGERPRINT_BYTES: Final = 16
NOT_FOR_OTHERS: Final = 0o077
MAX_KEYS: Final = 65_536
# A name is a file's, and a word in rules: nothing that either would take for something else.
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}")

# Of each file: its name, inode, size, and when it was written.
FolderFingerprint = frozenset[tuple[str, int, int, int]]


class CurveKeyPair(NamedTuple):
    """In Z85, as ZeroMQ wants them."""

    public: bytes
    secret: bytes


class AllowedKey(NamedTuple):
    name: str
    key: bytes  # its 32 bytes

    @property
    def fingerprint(self) -> str:
        """The client's id, in hex."""
        return sha256(self.key).hexdigest()[: 2 * FINGERPRINT_BYTES]

    @property
    def text(self) -> str:
        from zmq.utils import z85

        return z85.encode(self.key).decode()


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """A new pair in two files, the secret one for its owner alone."""
    import zmq  # here and below: help for the commands does without

    _check_name(name)
    _make_folder(folder)
    public, secret = zmq.curve_keypair()
    paths = folder / (name + PUBLIC), folder / (name + SECRET)
    for path in paths:
        if os.path.lexists(path):
            raise AlreadyExists(f"{path} is there already: take another name, or remove it")
    _write(paths[1], _text(public, secret), 0o600)
    _write(paths[0], _text(public), 0o644)
    return paths


def read_public(path: Path) -> bytes:
    """The 32 bytes of a public key in a file."""
    public, _ = _load(path)
    try:
        key = _decoded(public)
    except ValueError as error:
        raise ConfigError(f"{path}: no key can be read: {error}") from None
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{path}: a key has {KEY_BYTES} bytes, not {len(key)}")
    return key


def parse_key(text: str) -> bytes:
    """The 32 bytes of a public key as people write it, in Z85."""
    try:
        key = _decoded(text.encode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"{text[:64]!r} is no key: it has {KEY_CHARS} characters in Z85")
    return bytes(key)


class CurveKeyFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.allowed_folder = folder / ALLOWED

    @property
    def own_public(self) -> Path:
        return self.folder / (SERVER_KEY_NAME + PUBLIC)

    def load_own_pair(self) -> CurveKeyPair:
        """The bus's own pair, made if it has none."""
        secret = self.folder / (SERVER_KEY_NAME + SECRET)
        if not os.path.lexists(secret):
            self.own_public.unlink(missing_ok=True)
            make_pair(self.folder, SERVER_KEY_NAME)
        if secret.stat().st_mode & NOT_FOR_OTHERS:
            raise ConfigError(f"{secret} can be read by other users: chmod 600 {secret}")
        public, private = _load(secret)
        if private is None:
            raise ConfigError(f"{secret} has no secret key")
        return CurveKeyPair(public, private)

    def allowed(self) -> list[AllowedKey]:
        """All that are let in, by name; `ConfigError` if one of them cannot be read."""
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
                raise AlreadyExists(f"this key is let in already, as {other.name!r}")
            if other.name == name:
                raise AlreadyExists(f"{name!r} is the name of another key: take another")
        _make_folder(self.allowed_folder)
        new = AllowedKey(name, key)
        _write(self.allowed_folder / (name + PUBLIC), _text(new.text.encode()), 0o644)
        return new

    def revoke(self, which: str) -> AllowedKey:
        """By name, fingerprint or the key itself."""
        for one in self.allowed():
            if which in (one.name, one.fingerprint, one.text):
                (self.allowed_folder / (one.name + PUBLIC)).unlink()
                return one
        raise DoesNotExist(f"no key {which!r} is let in: see 'polybus keys ls'")

    def read_fingerprint(self) -> FolderFingerprint:
        """Another one after a key was let in, revoked or replaced, whoever did it."""
        with contextlib.suppress(OSError), os.scandir(self.allowed_folder) as files:
            found = [(one.name, one.stat()) for one in files]
            return frozenset((name, at.st_ino, at.st_size, at.st_mtime_ns) for name, at in found)
        return frozenset()


def _load(path: Path) -> tuple[bytes, bytes | None]:
    """Public and secret key of a file, in Z85."""
    import zmq.auth

    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no key can be read: {error}") from None


def _decoded(text: bytes) -> bytes:
    """`ValueError` if it is no Z85."""
    from zmq.utils import z85

    try:
        return bytes(z85.decode(text))
    except (KeyError, IndexError) as error:
        raise ValueError(f"no Z85: {error}") from None


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(f"{name[:64]!r} is no name of a key: letters, digits and _.@- are")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from None


def _text(public: bytes, secret: bytes | None = None) -> str:
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str, mode: int) -> None:
    """Whole or not at all, and never over another file."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
