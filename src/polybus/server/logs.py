"""Logs: one line per event, on stderr, times in UTC.

    2026-01-31T12:00:00.123Z warning  slow_consumer  dialect=rqueue peer=127.0.0.1:51234
    {"at": "2026-01-31T12:00:00.123Z", "level": "warning", "event": "slow_consumer", ...}

The first form is for people, the second (`--log-format json`) for machines. Colours are used
on a terminal only. Text of a peer is quoted, so it cannot forge a line.

`LogRateLimiter` keeps a flood of events from filling the disk. `LineWriter` keeps a stderr
that is not read from blocking the bus.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

import structlog

from polybus.model.control_characters import escape_controls
from polybus.server.line_writer import LineWriter
from polybus.server.log_rate_limit import EventKind, LogRateLimiter
from polybus.server.settings import LogSettings

Event = MutableMapping[str, Any]

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
COLOURS = {"debug": "\x1b[2m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
RESET = "\x1b[0m"
LEVEL_WIDTH = max(map(len, LEVELS))
STDERR_FD = 2


class Logs:
    """The log of one process: `logger` writes to it, `tick` closes floods, `close` flushes."""

    def __init__(self, settings: LogSettings, clock: Callable[[], float], fd: int = STDERR_FD):
        self._writer = LineWriter(fd)
        self._flood = LogRateLimiter(settings.max_repeats_per_s, clock)
        has_colours = os.isatty(fd) and not os.environ.get("NO_COLOR")
        self.logger: Any = structlog.wrap_logger(
            _Lines(self._writer),
            processors=[
                self._flood,
                structlog.processors.format_exc_info,
                _stamp,
                _json if settings.format == "json" else _human(has_colours),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(LEVELS[settings.level]),
            cache_logger_on_first_use=True,
        )
        # asyncio and libraries log through the standard module; all lines go to one stream.
        root = logging.getLogger()
        root.handlers = [_StandardHandler(self.logger)]
        root.setLevel(logging.WARNING)

    @property
    def dropped(self) -> int:
        """The number of lines that stderr did not accept."""
        return self._writer.dropped

    def tick(self) -> None:
        """Log how many repeats of each event were suppressed."""
        self._log_repeats(self._flood.summaries())

    def close(self) -> None:
        self._log_repeats(self._flood.summaries(final=True))
        self._writer.close()

    def _log_repeats(self, held_back: Iterable[tuple[EventKind, int]]) -> None:
        for (level, event, facts), count in held_back:
            getattr(self.logger, level)(event, **dict(facts), repeated=count)


class _Lines:
    """The logger that structlog calls with the finished line, at any level."""

    def __init__(self, writer: LineWriter) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = writer.write
        self.msg = writer.write


def _stamp(_logger: Any, method: str, event: Event) -> Event:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    level = "error" if method == "exception" else method
    return {"at": now, "level": level, "event": event.pop("event", ""), **event}


def _json(_logger: Any, _method: str, event: Event) -> str:
    return json.dumps(event, default=str)  # ASCII only: not every reader splits lines alike


def _human(colours: bool) -> Callable[[Any, str, Event], str]:
    def render(_logger: Any, _method: str, event: Event) -> str:
        trace = event.pop("exception", None)
        at, level, name = event.pop("at"), event.pop("level"), event.pop("event")
        facts = " ".join(f"{key}={_quoted(event[key])}" for key in sorted(event))
        line = f"{at} {level:<{LEVEL_WIDTH}} {_quoted(name, plain=' ')}"
        line = f"{line}  {facts}" if facts else line
        if colours and level in COLOURS:
            line = f"{COLOURS[level]}{line}{RESET}"
        return f"{line}\n{escape_controls(trace)}" if trace else line

    return render


def _quoted(value: Any, plain: str = "") -> str:
    """Return the text, as JSON if it has spaces, quotes or control characters."""
    text = str(value)
    if text and all(char in plain or (char.isprintable() and char not in ' "=') for char in text):
        return text
    return json.dumps(text)


class _StandardHandler(logging.Handler):
    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        facts: Mapping[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
        level = record.levelname.lower()
        write = getattr(self._logger, level if level in LEVELS else "error")
        write("library", library=record.name, text=record.getMessage(), **facts)
