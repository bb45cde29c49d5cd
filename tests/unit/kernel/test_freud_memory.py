"""Freud in the kernel: nothing leaks, and no byte outside a buffer is accessed."""

from __future__ import annotations

import gc
import struct
import subprocess
import sys
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from polybus.dialects.freud.client.answer_batch import encode_gets, encode_produces, scan_answers
from polybus.dialects.freud.server.answer_encoder import encode_messages, encode_records
from polybus.dialects.freud.server.request_scanner import ProduceRun, RequestScanner

CAP = 1000
ROUNDS = 200
SLACK_BYTES = 4096  # a leak is ROUNDS times more
MANY = encode_produces(b"t", [bytes(50)] * 300, CAP)
UNKNOWN, TOO_LARGE = struct.pack("<II", 99, 0), struct.pack("<II", 4, CAP + 1)
MIXED = MANY + encode_gets(bytes(16), 2, 0) + UNKNOWN + TOO_LARGE
ODD_NAME = struct.pack("<III", 0, 5, 1) + b"\xff"


def scanner() -> RequestScanner:
    return RequestScanner(CAP, lambda raw: True)


def scan_mixed() -> None:
    assert len(scanner().scan(MIXED, 0, len(MIXED)).groups) == 4


def fail_to_judge() -> None:
    data = MIXED[: -len(TOO_LARGE)] + ODD_NAME
    with pytest.raises(ZeroDivisionError):
        RequestScanner(CAP, lambda raw: bool(1 // 0)).scan(data, 0, len(data))


def answer_and_read() -> None:
    (group,) = scanner().scan(MANY, 0, len(MANY)).groups
    assert isinstance(group, ProduceRun)
    data = encode_messages(group.offsets, group.bodies, 0, 300)
    batch = scan_answers(data, 0, len(data), CAP)[1]
    assert batch.payloads(0, 300) == [bytes(50)] * 300


def be_rejected() -> None:
    with pytest.raises(ValueError, match="offsets"):
        encode_messages(array("i", [0, 9]), b"", 0, 1)
    with pytest.raises(ValueError, match="time"):
        encode_records(0, b"", 0, array("i", [0, 0]), b"", 0, 1)
    with pytest.raises(ValueError, match="within"):
        scanner().scan(b"", 0, 1)


@pytest.mark.parametrize("act", [scan_mixed, fail_to_judge, answer_and_read, be_rejected])
def test_nothing_leaks(act: Callable[[], None]) -> None:
    tracemalloc.start()
    try:
        for _ in range(10):
            act()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        for _ in range(ROUNDS):
            act()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - held < SLACK_BYTES
    finally:
        tracemalloc.stop()


def run_in_a_process(module: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.unit.kernel.{module}"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    return done.stdout


def test_no_byte_outside_the_buffer_is_accessed() -> None:
    """Buffers of every size between two forbidden pages."""
    assert run_in_a_process("freud_forbidden_pages") == "nothing outside was touched\n"


def test_failed_allocations_corrupt_nothing() -> None:
    pytest.importorskip("_testcapi", reason="this Python has no allocator that fails on demand")
    assert run_in_a_process("freud_no_memory") == "nothing was broken\n"
