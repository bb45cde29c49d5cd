"""Publish lines of stdin, or arguments, for `pub` and `fdq produce`.

Input is read in large pieces; each piece is sent as one batch and stored completely or not
at all. The first refused batch stops the command; the summary shows the stored messages.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from stat import S_ISREG
from typing import TYPE_CHECKING, NamedTuple, Protocol

from polybus.cli.progress_bar import format_size, show_progress
from polybus.cli.text_table import count_of
from polybus.errors import UsageError
from polybus.model.duration import parse_duration_ms

if TYPE_CHECKING:
    from polybus.native import Produced

PIECE_BYTES = 1 << 20
# The bus's own limit of a batch.
MAX_LINE_BYTES = 128 << 20
BATCH_LINES = 16_384
STDIN = 0


class BatchProducer(Protocol):
    """A sender of batches: returns a future of the result."""

    def produce(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        /,
        *,
        delay_s: float | None = None,
        ttl_s: float | None = None,
    ) -> Future[Produced]: ...


def send_input(sending: LineProducer, messages: Sequence[str] | None, whole: bool) -> None:
    """Send the arguments if there are any, else stdin."""
    if messages:
        sending.send([os.fsencode(text) for text in messages])
    elif whole:
        sending.send([b"".join(_pieces())])
    else:
        for lines in line_batches():
            sending.send(lines)


class MessageKeys:
    """The keys of messages: one for all (--key), or split from each line (--key-sep)."""

    def __init__(self, key: str | None, separator: str | None) -> None:
        if key is not None and separator is not None:
            raise UsageError("--key and --key-sep exclude each other")
        if separator == "":
            raise UsageError("--key-sep must have at least one character, got none")
        self._key = key
        self._separator = separator and os.fsencode(separator)

    def split_keys(self, bodies: list[bytes]) -> tuple[list[bytes], list[str | None] | None]:
        if self._separator:
            return self._cut(bodies, self._separator)
        return bodies, None if self._key is None else [self._key] * len(bodies)

    def _cut(self, lines: list[bytes], separator: bytes) -> tuple[list[bytes], list[str | None]]:
        """Split a line into key and message; a line without separator has no key."""
        cuts = [line.partition(separator) for line in lines]
        try:
            keys = [key.decode() if found else None for key, found, _ in cuts]
        except UnicodeDecodeError:
            raise UsageError("--key-sep: a key must be UTF-8") from None
        return [rest if found else key for key, found, rest in cuts], keys


class _Sent(NamedTuple):
    future: Future[Produced]
    messages: int
    bytes: int


class LineProducer:
    """Sends batches and stops at the first refused one."""

    def __init__(
        self,
        topic: str,
        keys: MessageKeys,
        max_lines: int = BATCH_LINES,
        *,
        delay: str | None = None,
        ttl: str | None = None,
    ) -> None:
        """`delay` and `ttl` are durations. Raises `UsageError` if one is not."""
        self._topic = topic
        self._keys = keys
        self._delay_s = None if delay is None else parse_duration_ms(delay) / 1000
        self._ttl_s = None if ttl is None else parse_duration_ms(ttl) / 1000
        self._max_lines = max_lines
        self._taker: BatchProducer
        self._sent: deque[_Sent] = deque()
        self._messages = 0
        self._bytes = 0
        self.began_s: float | None = None

    @contextmanager
    def sending_to(self, taker: BatchProducer) -> Iterator[None]:
        """Return when all batches are stored; after an error, cancel those not sent yet."""
        self._taker, self.began_s = taker, time.monotonic()
        try:
            yield
            while self._sent:
                self._await_first()
        except BaseException:
            for one in self._sent:
                one.future.cancel()
            raise

    def send(self, bodies: list[bytes]) -> None:
        for start in range(0, len(bodies), self._max_lines):
            batch, keys = self._keys.split_keys(bodies[start : start + self._max_lines])
            future = self._taker.produce(
                self._topic, batch, keys, delay_s=self._delay_s, ttl_s=self._ttl_s
            )
            self._sent.append(_Sent(future, len(batch), sum(map(len, batch))))
        while self._sent and self._sent[0].future.done():
            self._await_first()

    def print_summary(self, took_s: float) -> None:
        """Print the stored messages once every batch has its result."""
        for one in self._sent:
            if one.future.done() and not one.future.cancelled() and not one.future.exception():
                self._count(one)
        rate = self._messages / max(took_s, 1e-9)
        text = f"{count_of(self._messages, 'message')}, {format_size(self._bytes)}, {rate:.0f}/s"
        print(text, file=sys.stderr, flush=True)

    def _await_first(self) -> None:
        self._sent[0].future.result()
        self._count(self._sent.popleft())

    def _count(self, one: _Sent) -> None:
        self._messages += one.messages
        self._bytes += one.bytes


def line_batches() -> Iterator[list[bytes]]:
    """Yield pieces of stdin that end at a line end. Raises UsageError if a line is too long."""
    rest: list[bytes] = []
    waiting = 0
    for piece in _pieces():
        cut = piece.rfind(b"\n")
        if cut < 0:
            rest.append(piece)
            waiting += len(piece)
            if waiting > MAX_LINE_BYTES:
                raise UsageError(
                    f"a line must have at most {format_size(MAX_LINE_BYTES)};"
                    " use --whole to publish one message"
                )
            continue
        yield (b"".join(rest) + piece[:cut]).split(b"\n")
        rest, waiting = [piece[cut + 1 :]], 0
    if last := b"".join(rest):
        yield [last]


def _pieces() -> Iterator[bytes]:
    """Yield stdin in pieces, with a progress bar for a file on a terminal."""
    status = os.fstat(STDIN)
    shows = S_ISREG(status.st_mode) and sys.stderr is not None and sys.stderr.isatty()
    if not shows:
        yield from iter(lambda: os.read(STDIN, PIECE_BYTES), b"")
        return
    done = 0
    with show_progress("publishing") as show:
        while piece := os.read(STDIN, PIECE_BYTES):
            yield piece
            done += len(piece)
            show(done, max(done, status.st_size))
