"""The terminal of a command: it gets no control characters but those that polybus draws.

`protect_terminal` puts a filter below stdout and stderr, if they are terminals, before the
command runs. So every command is covered, whatever it prints: text, JSON, bodies, errors. A
pipe or a file gets the bytes unchanged. Colours, tables and bars go to the stream below the
filter (`drawing_stream`); their cells are escaped before.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, TextIO

from polybus.model.control_characters import ControlEscaper

if TYPE_CHECKING:
    from typing_extensions import Buffer


class TerminalFilter(io.BufferedIOBase):
    """The bytes of a text stream, escaped and passed on to the terminal."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        self._escaper = ControlEscaper()

    def write(self, data: Buffer) -> int:
        raw = bytes(data)
        text = self._escaper.escape(raw)
        self.terminal.buffer.write(text.encode(self.terminal.encoding, "backslashreplace"))
        return len(raw)

    def flush(self) -> None:
        self.terminal.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.terminal.fileno()


def protect_terminal() -> None:
    """Filter stdout and stderr of this process, if they are terminals."""
    sys.stdout = _protected(sys.stdout)
    sys.stderr = _protected(sys.stderr)


def print_raw(raw: bool) -> None:
    """End the filter of stdout if the caller asked for it (`flags.Raw`)."""
    if raw:
        sys.stdout = drawing_stream(sys.stdout)


def drawing_stream(stream: TextIO) -> TextIO:
    """Return the stream below the filter, for text that polybus draws itself."""
    below = getattr(stream, "buffer", None)
    return below.terminal if isinstance(below, TerminalFilter) else stream


def _protected(stream: TextIO) -> TextIO:
    # None: the process was started without the descriptor.
    if stream is None or not stream.isatty():  # type: ignore[redundant-expr]
        return stream
    # Bytes that the command line could not decode become bytes again, and are escaped as such.
    return io.TextIOWrapper(
        TerminalFilter(stream),  # type: ignore[type-var]
        encoding="utf-8",
        errors="surrogateescape",
        line_buffering=True,
        write_through=True,
    )
