"""Options and URLs of the native client."""

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
    """Options of a client. `token_file` contains only the token, `authorities` the TLS roots."""

    token_file: Path | None = None
    authorities: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    # Time to retry a call or the first connection while the bus is unreachable.
    connect_timeout_s: float = 10.0
    # Timeout of an action; must exceed the 30 s that a wait may take.
    call_timeout_s: float = 60.0
    # A producer fails after this time without an answer; None: it retries forever.
    produce_timeout_s: float | None = None
    # Delay between attempts: doubles from the first to the last, with jitter.
    first_backoff_s: float = 0.05
    last_backoff_s: float = 2.0
    # Batches of a producer in flight; the bus keeps 16 answers for repeats.
    max_in_flight: int = 16
    # Limits of a batch that is merged from queued messages.
    max_batch_rows: int = 16_384
    max_batch_bytes: int = 4 << 20
    # Limit of the send queue; beyond it `produce` blocks.
    max_waiting_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.max_in_flight <= KEPT_RESULTS:
            raise UsageError(
                f"max_in_flight must be from 1 to {KEPT_RESULTS}, got {self.max_in_flight}"
            )
        if (self.certificate is None) != (self.key is None):
            raise UsageError("certificate and key must be given together")


def bus_url(given: str | None, environ: Mapping[str, str]) -> str:
    """Return the given URL, else that of $POLYBUS_URL, else the default."""
    return given or environ.get(URL_VARIABLE) or DEFAULT_URL


def parse_url(url: str, options: ClientOptions | None) -> tuple[str, ClientOptions]:
    """Split the files after `?` from a URL, so that one variable can configure a client:

    polybus+tls://bus.example:6570?authorities=/etc/ca.pem&token_file=/home/me/token
    """
    plain, _, query = url.partition("?")
    if not query:
        return url, options or ClientOptions()
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(given.keys() - set(FILES))
    if unknown or "" in given.values():
        raise AddressError(f"{url!r}: the query must name files: {', '.join(FILES)}")
    files = {name: Path(path) for name, path in given.items()}
    return plain, replace(options or ClientOptions(), **files)  # type: ignore[arg-type]


def flight_location(url: str) -> str:
    """Return the URL as a Flight location; raise `AddressError` if it is invalid."""
    parts = urlsplit(url)
    scheme = SCHEMES.get(parts.scheme)
    try:
        port = parts.port
    except ValueError:
        port = None
    if scheme is None or not parts.hostname or port is None or parts.path not in ("", "/"):
        raise AddressError(f"invalid bus URL {url!r}: expected for example {DEFAULT_URL}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{scheme}://{host}:{port}"


def read_file(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None
