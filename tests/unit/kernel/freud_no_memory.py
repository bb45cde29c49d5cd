"""Lets one allocation fail, the first, the second, and so on, in everything Freud's kernel does.

Each call must raise MemoryError or succeed, and leave its objects usable. A mistake here is a
crash, so test_freud_memory.py runs this as a process of its own.
"""

from __future__ import annotations

import _testcapi  # type: ignore[import-not-found]
import sys
from array import array
from collections.abc import Callable

from polybus.dialects.freud.client.answer_batch import encode_gets, encode_produces, scan_answers
from polybus.dialects.freud.server.answer_encoder import (
    encode_answers,
    encode_messages,
    encode_produced,
    encode_records,
)
from polybus.dialects.freud.server.request_scanner import RequestScanner

CAP = 1000
MOST_ALLOCATIONS = 400  # more than any of these needs
BODIES = [bytes(50)] * 150
MIXED = b"".join(
    (
        *(encode_produces(name, BODIES, CAP) for name in (b"t", "ü".encode())),
        *(encode_gets(bytes(16), 2, 0), bytes((6, *bytes(7))), bytes((99, *bytes(7)))),
    )
)
OFFSETS, TIMES = array("i", range(0, 5050, 50)), array("Q", bytes(800))
ANSWERS = encode_records(0, TIMES, 0, OFFSETS, bytes(5000), 0, 100)


def scan() -> None:
    assert len(RequestScanner(CAP, lambda raw: True).scan(MIXED, 0, len(MIXED)).groups) == 5


def write_answers() -> None:
    assert encode_answers(1, 5, b"text")
    assert encode_produced(0, 5)
    assert encode_messages(OFFSETS, bytes(5000), 0, 100)
    assert encode_records(0, TIMES, 0, OFFSETS, bytes(5000), 0, 100)


def read_answers() -> None:
    batch = scan_answers(ANSWERS, 0, len(ANSWERS), CAP)[1]
    assert len(batch.payloads(0, 100)) == len(batch.records(0, 100)) == len(list(batch)) == 100


def read_ids() -> None:
    ids = encode_produced(2**63, 100)
    assert len(scan_answers(ids, 0, len(ids), CAP)[1].message_ids(0, 100)) == 100


def write_requests() -> None:
    assert encode_produces(b"t", BODIES, CAP)
    assert encode_gets(bytes(16), 100, 0)


def survives(act: Callable[[], None]) -> int:
    """Fail one allocation after the other. Returns how often `act` failed."""
    failed = 0
    for number in range(MOST_ALLOCATIONS):
        _testcapi.set_nomemory(number, number + 1)
        try:
            act()
        except MemoryError:
            failed += 1
        finally:
            _testcapi.remove_mem_hooks()
    act()
    return failed


def main() -> None:
    for act in (scan, write_answers, read_answers, read_ids, write_requests):
        assert survives(act), f"{act.__name__}: no allocation failed"
    sys.stdout.write("nothing was broken\n")


if __name__ == "__main__":
    main()
