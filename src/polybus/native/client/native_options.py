"""Where the bus is, who calls, and how patient the caller is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from polybus.errors import AddressError, ConfigError, UsageError
from polybus.model.stamp import KEPT_RESULTS

DEFAULT_URL = "polybus://127.0.0.1:6570"
URL_VARIABLE = "POLYBUS_URL"
FILES = ("token_file", "authorities", "certificate", "key")
# scheme → Flight's
SCHEMES = {"polybus": "grpc", "polybus+tls": "grpc+tls"}


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """`token_file` holds a token, and nothing else; `authorities` whom to trust over TLS."""

    token_file: Path | None = None
    authorities: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    # How long a call, or a first connection, tries to reach the bus before it gives up.
    connect_timeout_s: float = 10.0
    # An action that was not answered for so long is given up; a wait is at most 30 s.
    call_timeout_s: float = 60.0
    # A producer that got no answer for so long is at its end; None: it goes on for ever.
    produce_timeout_s: float | None = None
    # Between tries: doubles from the first to the last, with jitter.
    first_backoff_s: float = 0.05
    last_backoff_s: float = 2.0
    # Batches of a producer on their way at once; the bus keeps 16 answers for repeats.
    max_in_flight: int = 16
    # What waits is merged into batches of at most this much.
    max_batch_rows: int = 16_384
    max_batch_bytes: int = 4 << 20
    # What may wait to be sent; beyond it `produce` blocks.
    max_waiting_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.max_in_flight <= KEPT_RESULTS:
            raise UsageError(f"max_in_flight is from 1 to {KEPT_RESULTS}")
        if (self.certificate is None) != (self.key is None):
            raise UsageError("a certificate needs its key, and a key its certificate")


def bus_url(given: str | None, environ: Mapping[str, str]) -> str:
    """The bus that a command means: the one given, else the environment's, else the default."""
    return given or environ.get(URL_VARIABLE) or DEFAULT_URL


def parse_url(url: str, options: ClientOptions | None) -> tuple[str, ClientOptions]:
    """A URL may name files after a `?`, so that one variable says all there is to a bus:

    polybus+tls://bus.example:6570?authorities=/etc/ca.pem&token_file=/home/me/token
    """
    plain, _, query = url.partition("?")
    if not query:
        return url, options or ClientOptions()
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(given.keys() - set(FILES))
    if unknown or "" in given.values():
        raise AddressError(f"{url!r}: behind the ? stand {', '.join(FILES)}, each with a file")
    files = {name: Path(path) for name, path in given.items()}
    return plain, replace(options or ClientOptions(), **files)  # type: ignore[arg-type]


def flight_location(url: str) -> str:
    """The URL as Flight wants it."""
    parts = urlsplit(url)
    scheme = SCHEMES.get(parts.scheme)
    try:
        port = parts.port
    except ValueError:
        port = None
    if scheme is None or not parts.hostname or port is None or parts.path not in ("", "/"):
        raise AddressError(f"{url!r} is no bus: write for example {DEFAULT_URL}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{scheme}://{host}:{port}"


def read_file(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} {path}: cannot be read: {error.strerror}") from None
