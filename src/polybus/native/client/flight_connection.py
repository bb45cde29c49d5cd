"""A connection to a bus, opened on first use and again after it was lost; error translation."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from polybus.errors import (
    ConnectionLost,
    Denied,
    MalformedRequest,
    NotConnected,
    PeerError,
    PolybusError,
    StoreClosed,
    TooLarge,
    Unavailable,
    error_from_code,
)
from polybus.native.client.native_options import ClientOptions, flight_location, read_file

# gRPC reports only in the message whether a connection was ever established.
CONNECT_FAILURES = ("failed to connect", "connection refused", "connect failed", "name resolution")


def decode_error(error: dict[str, Any]) -> PolybusError:
    """Return the error that the bus answered with."""
    return error_from_code(str(error.get("code", "")), str(error.get("text", "")))


def translate_error(error: BaseException, url: str) -> PolybusError:
    """Return the polybus error for an error of Flight."""
    info = getattr(error, "extra_info", None)
    if info:
        try:
            return decode_error(json.loads(info))
        except (ValueError, AttributeError):
            return PeerError(f"{url} returned an unknown error: {error}")
    text = str(error)
    if isinstance(error, flight.FlightUnavailableError):
        if any(words in text.lower() for words in CONNECT_FAILURES):
            return NotConnected(f"no bus answers at {url}; start one with `polybus serve`")
        return ConnectionLost(f"the connection to {url} was lost")
    if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
        return Denied(text)
    if isinstance(error, flight.FlightCancelledError | flight.FlightTimedOutError):
        return ConnectionLost(f"{url}: the call was cancelled or timed out")
    if "larger than max" in text:
        return TooLarge(text)
    if isinstance(error, pa.ArrowInvalid | pa.ArrowTypeError):
        return MalformedRequest(text)
    return ConnectionLost(f"{url}: {text.splitlines()[0] if text else type(error).__name__}")


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    try:
        yield
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        raise translate_error(error, url) from None


T = TypeVar("T")
# Retryable errors; any other error is the answer of the bus.
RETRYABLE = (ConnectionLost, NotConnected, StoreClosed)
# gRPC delays reconnects by up to two minutes, for all channels of a process to one address
# together. A local subchannel pool gives each client its own connection, and a new attempt
# uses a new channel.
CHANNEL = [("grpc.use_local_subchannel_pool", 1)]


class FlightConnection:
    def __init__(self, url: str, options: ClientOptions) -> None:
        self.url = url
        self.options = options
        self.closed = Event()
        self.retry_timeout_s = options.connect_timeout_s
        self._location = flight_location(url)
        self._lock = Lock()
        self._flight: flight.FlightClient | None = None

    @contextmanager
    def borrow_client(self) -> Iterator[flight.FlightClient]:
        """Yield a Flight client; translate errors of the block."""
        client = self._client()
        try:
            with translate_errors(self.url):
                yield client
        except NotConnected:
            self.discard_client(client)
            raise

    def discard_client(self, failed: flight.FlightClient) -> None:
        """Use a new client for the next call. Pending calls of the failed one go on."""
        with self._lock:
            if self._flight is failed:
                self._flight = None

    def _client(self) -> flight.FlightClient:
        with self._lock:
            if self.closed.is_set():
                raise ConnectionLost("the client is closed")
            if self._flight is None:
                options, tls = self.options, {}
                if options.authorities is not None:
                    tls["tls_root_certs"] = read_file(options.authorities, "authorities")
                if options.certificate is not None and options.key is not None:
                    tls["cert_chain"] = read_file(options.certificate, "certificate")
                    tls["private_key"] = read_file(options.key, "key")
                with translate_errors(self.url):
                    self._flight = flight.connect(self._location, generic_options=CHANNEL, **tls)
            return self._flight

    def call_options(self, timeout_s: float | None = None) -> Any:
        token = self.options.token_file
        headers = []
        if token is not None:
            headers.append((b"authorization", b"Bearer " + read_file(token, "token").strip()))
        return flight.FlightCallOptions(timeout=timeout_s, headers=headers)

    def act(self, name: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run an action; retry for up to `retry_timeout_s` while the bus is unreachable."""
        return self.retry(lambda: self.act_once(name, request or {}))

    def retry(self, step: Callable[[], T]) -> T:
        """Run a step; repeat it after retryable errors for up to `retry_timeout_s`."""
        began_s = time.monotonic()
        for pause_s in self.retry_delays():
            try:
                return step()
            except RETRYABLE:
                waited_s = time.monotonic() + pause_s - began_s
                if waited_s > self.retry_timeout_s or self.closed.is_set():
                    raise
            self.closed.wait(pause_s)
        raise Unavailable("retry delays ended")  # pragma: no cover

    def retry_delays(self) -> RetryDelays:
        return RetryDelays(self.options.first_backoff_s, self.options.last_backoff_s)

    def close(self) -> None:
        with self._lock:
            self.closed.set()
            if self._flight is not None:
                self._flight.close()
                self._flight = None

    def act_once(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Run an action without retries."""
        results = list(self.stream(name, request))
        try:
            answer: dict[str, Any] = json.loads(results[0].to_pybytes())
        except (IndexError, ValueError):
            raise PeerError(f"{self.url} returned no valid answer to {name}") from None
        return answer

    def stream(self, name: str, request: dict[str, Any]) -> Iterator[Any]:
        """Yield the results of an action as they arrive."""
        action = flight.Action(name, json.dumps(request).encode())
        options = self.call_options(self.options.call_timeout_s)
        with self.borrow_client() as client:
            for result in client.do_action(action, options):
                yield result.body


class RetryDelays:
    """Delays between attempts: exponential with jitter, so that clients spread out."""

    def __init__(self, first_s: float, last_s: float) -> None:
        self._next_s = first_s
        self._last_s = last_s

    def __iter__(self) -> RetryDelays:
        return self

    def __next__(self) -> float:
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._last_s)
        return pause_s * random.uniform(0.5, 1.0)
