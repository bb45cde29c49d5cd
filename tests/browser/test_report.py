"""The report in a real browser: it is laid out, drawn, and asks the network for nothing.

Chromium's own view of the page (`--dump-dom`, a screenshot) is looked at, and a log of its
network. It finds no name there: the page must stand without, and not even try.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path

import pytest

from polybus.spark.pipelines.stats.report_page import page
from polybus.spark.pipelines.stats.topic_figures import (
    GroupSample,
    Histogram,
    KeyCount,
    ShardCount,
    TimeWindow,
    TopicFigures,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT_S = 100
SIZES = Histogram({50: 30, 60: 9}, 181)
WIDTH, HEIGHT = 1000, 800
COLOUR = (47, 111, 222)  # --c0 of the style, in light
HOST = re.compile(r"(?:https?|wss?|ftp)://([\w.-]+)")
ITS_OWN = ("google.com", "googleapis.com", "gvt1.com")  # hosts that Chromium contacts by itself

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: .ci/need command chromium")


def topics() -> list[TopicFigures]:
    windows = [
        TimeWindow(1_790_000_000 + 10 * n, 10, 50 + n % 40, 9000, SIZES, Histogram({80: 20, 90: n}))
        for n in range(300)
    ]
    groups = [
        GroupSample(
            1_790_000_000.0 + 60 * n, "billing", 2, 500 - n, 1.5, n, 0, 0, {"1": 5, "inf": 1}
        )
        for n in range(9)
    ]
    keys = [KeyCount(f"customer-{n} <b>", 900 - n, 1) for n in range(20)]
    shards = [ShardCount(n, 1000 + n, 1) for n in range(16)]
    return [
        TopicFigures(name, windows, keys, 20, 5, shards, groups) for name in ("orders", "invoices")
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(topics(), "polybus://127.0.0.1:6570", 1_790_000_000.0))
    return path


def chromium(report: Path, *options: str) -> str:
    """Run Chromium on the report with its own home. Returns its output."""
    home = report.parent / "home"
    command = [
        *(str(CHROMIUM), "--headless", "--disable-gpu", "--hide-scrollbars"),
        *("--disable-background-networking", "--no-first-run", f"--user-data-dir={home}"),
        "--host-resolver-rules=MAP * ~NOTFOUND",
        *(["--no-sandbox"] if os.getuid() == 0 else []),
        *options,
        report.as_uri(),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=report.parent
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_page_is_laid_out_and_drawn(report):
    """The DOM has all plots, and the screenshot has their colour in many places."""
    shot = report.parent / "shot.png"
    size = f"--window-size={WIDTH},{HEIGHT}"
    dom = chromium(report, size, f"--screenshot={shot}", "--dump-dom")
    assert dom.count("<svg") == 2 * 11
    assert "customer-3 &lt;b&gt;" in dom
    width, height, pixels = read_png(shot.read_bytes())
    assert (width, height) == (WIDTH, HEIGHT)
    colours = Counter(pixels[n : n + 3] for n in range(0, len(pixels), 3))
    near = sum(
        count
        for colour, count in colours.items()
        if all(abs(a - b) < 40 for a, b in zip(colour, COLOUR, strict=True))
    )
    assert near > 1000, "no plot was drawn"


def test_page_fetches_nothing(report):
    log = report.parent / "network.json"
    chromium(report, f"--log-net-log={log}", "--dump-dom")
    text = log.read_text()
    assert json.loads(text)["events"]
    hosts = {host for host in HOST.findall(text) if not host.endswith(ITS_OWN)}
    assert hosts == set()


def read_png(data: bytes) -> tuple[int, int, bytes]:
    """Return width, height and RGB pixels of a PNG with 8 bits per channel."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, packed = 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", body[:10])
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    assert (depth, colour) in ((8, 2), (8, 6))
    return width, height, _unfiltered(zlib.decompress(packed), width, height, 3 + colour // 6)


def _unfiltered(raw: bytes, width: int, height: int, each: int) -> bytes:
    """Undo PNG's filters, line by line."""
    line, found, before = width * each, bytearray(), bytes(width * each)
    for row in range(height):
        start = row * (line + 1)
        kind, now = raw[start], bytearray(raw[start + 1 : start + 1 + line])
        for n in range(line if kind else 0):
            left = now[n - each] if n >= each else 0
            up, corner = before[n], before[n - each] if n >= each else 0
            guess = (0, left, up, (left + up) // 2, _paeth(left, up, corner))[kind]
            now[n] = (now[n] + guess) & 255
        before = bytes(now)
        found += b"".join(before[n : n + 3] for n in range(0, line, each))
    return bytes(found)


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda one: abs(guess - one))
