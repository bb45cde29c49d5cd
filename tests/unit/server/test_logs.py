"""Log lines: one an event, never forged, never blocking."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import pty
import re
import threading
import time
from collections.abc import Iterator

import pytest

from polybus.server import line_writer
from polybus.server.line_writer import LineWriter
from polybus.server.logs import Logs
from polybus.server.settings import LogSettings
from tests.rig.observer import until


class Sink:
    """A pipe with a log at its writing end."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def text(self) -> str:
        os.close(self.writer)
        with os.fdopen(self.reader, closefd=False) as file:
            return file.read()

    def close(self) -> None:
        for fd in (self.reader, self.writer):
            try:
                os.close(fd)
            except OSError:
                pass


@pytest.fixture
def sink() -> Iterator[Sink]:
    sink = Sink()
    handlers = logging.getLogger().handlers
    yield sink
    logging.getLogger().handlers = handlers
    sink.close()


def lines(sink: Sink, logs: Logs) -> list[str]:
    logs.close()
    return sink.text().splitlines()


def test_line_for_people(sink):
    logs = Logs(LogSettings(), time.monotonic, sink.writer)
    logs.logger.warning("connection cut", peer="127.0.0.1:9", dialect="rqueue", n=3, text="a b")
    (line,) = lines(sink, logs)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z warning  connection cut  "
        r'dialect=rqueue n=3 peer=127.0.0.1:9 text="a b"',
        line,
    )


def test_line_for_machines(sink):
    logs = Logs(LogSettings(format="json"), time.monotonic, sink.writer)
    logs.logger.info("started", peer="é\n", path=b"\xff", n=1)
    (line,) = lines(sink, logs)
    fields = json.loads(line)
    assert fields.pop("at").endswith("Z")
    assert fields == {
        "level": "info",
        "event": "started",
        "peer": "é\n",
        "path": "b'\\xff'",
        "n": 1,
    }


@pytest.mark.parametrize("style", ["human", "json"])
@pytest.mark.parametrize(
    "evil", ["a\nb", "a\r\nfake", "\x1b[31mred", 'q" x=1', "\x85", "\u2028", ""]
)
def test_peer_text_cannot_forge_a_line(sink, style, evil):
    logs = Logs(LogSettings(format=style), time.monotonic, sink.writer)
    logs.logger.info("connection closed", peer=evil)
    event = f"event {evil}"
    logs.logger.info(event)
    written = "\n".join(lines(sink, logs))
    assert written.count("\n") == 1
    assert "\x1b" not in written
    assert "\r" not in written


def test_lines_below_the_level_are_dropped(sink):
    logs = Logs(LogSettings(level="warning"), time.monotonic, sink.writer)
    logs.logger.info("quiet")
    logs.logger.warning("loud")
    assert [line.split()[2] for line in lines(sink, logs)] == ["loud"]


def test_exception_is_logged_with_traceback(sink):
    logs = Logs(LogSettings(), time.monotonic, sink.writer)
    try:
        raise ValueError("boom")
    except ValueError as error:
        logs.logger.error("unexpected error", where="timer", exc_info=error)
    text = "\n".join(lines(sink, logs))
    assert "unexpected error  where=timer\nTraceback" in text
    assert text.endswith("ValueError: boom")


def test_library_logs_go_to_the_same_stream(sink):
    logs = Logs(LogSettings(format="json"), time.monotonic, sink.writer)
    logging.getLogger("asyncio").error("slow callback: %s", "x")
    logging.getLogger("asyncio").info("chatter")
    (line,) = lines(sink, logs)
    fields = json.loads(line)
    assert (fields["level"], fields["library"], fields["text"]) == (
        "error",
        "asyncio",
        "slow callback: x",
    )


def test_flood_is_a_few_lines_and_a_count(sink):
    logs = Logs(LogSettings(format="json", max_repeats_per_s=3), lambda: 0.0, sink.writer)
    for _ in range(1000):
        logs.logger.warning("connection refused", peer="x", reason="max_connections")
    said = [json.loads(line) for line in lines(sink, logs)]
    assert [fields.get("repeated") for fields in said] == [None, None, None, 997]
    assert said[-1]["reason"] == "max_connections"


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_are_used_on_a_terminal_only(monkeypatch, no_color, coloured):
    monkeypatch.setenv("NO_COLOR", no_color)
    controller, terminal = pty.openpty()
    handlers = logging.getLogger().handlers
    try:
        logs = Logs(LogSettings(), time.monotonic, terminal)
        logs.logger.warning("connection cut")
        logs.close()
        assert (b"\x1b[33m" in os.read(controller, 1000)) is coloured
    finally:
        logging.getLogger().handlers = handlers
        os.close(controller)
        os.close(terminal)


def test_unread_stderr_does_not_block(sink, monkeypatch):
    monkeypatch.setattr(line_writer, "CLOSE_TIMEOUT_S", 0.05)
    writer = LineWriter(sink.writer)
    for _ in range(30_000):
        writer.write("x" * 100)
    assert writer.dropped > 0
    writer.close()  # gives up after its time: the pipe is still full
    # Once the pipe is read, the queued lines arrive, and the number of lost ones. On a busy
    # machine that notice may come between two parts of the queue.
    line, notice = b"x" * 100 + b"\n", b"log lines lost: stderr did not take them"
    seen = b""
    while notice not in seen or seen.count(line) < 30_000 - writer.dropped:
        seen += os.read(sink.reader, 1 << 20)
    assert seen.count(line) == 30_000 - writer.dropped


def test_nonblocking_descriptor_is_waited_for(sink):
    flags = fcntl.fcntl(sink.writer, fcntl.F_GETFL)
    fcntl.fcntl(sink.writer, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    writer = LineWriter(sink.writer)
    for number in range(5000):
        writer.write(f"{number:>99}")
    seen = b""
    while seen.count(b"\n") < 5000:
        seen += os.read(sink.reader, 1 << 16)
    assert [int(line) for line in seen.splitlines()] == list(range(5000))
    writer.close()


def test_closed_pipe_loses_lines_only(sink):
    os.close(sink.reader)
    writer = LineWriter(sink.writer)
    for _ in range(100):
        writer.write("into the void")
    writer.close()
    assert writer.dropped == 100


def test_lines_lost_on_a_full_disk_are_counted_and_reported(sink, monkeypatch):
    """Lines that were written before the error, in the same write, are not lost."""
    full, taken = threading.Event(), threading.Event()
    full.set()
    write = os.write

    def sometimes(fd: int, data: bytes) -> int:
        if not full.is_set():
            return write(fd, data)
        if taken.is_set():
            raise OSError(errno.ENOSPC, "no space")
        taken.set()
        return write(fd, data[:7])

    monkeypatch.setattr(os, "write", sometimes)
    writer = LineWriter(sink.writer)
    with writer._wake:  # so that all three are written at once
        for line in ("first", "second", "third"):
            writer._lines.append(line)
        writer._wake.notify()
    until(lambda: writer.dropped == 2, "the second, half of which is there, and the third")
    full.clear()
    writer.write("again")
    writer.close()
    said = os.read(sink.reader, 1000).decode().splitlines()
    assert said == ["first", "sagain", "polybus: 2 log lines lost: stderr did not take them"]
