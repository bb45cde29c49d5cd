"""Reads requests and answers that lie between two pages which may not be touched.

See forbidden_pages.py; test_freud_memory.py runs this as a process of its own.
"""

from __future__ import annotations

import sys
from array import array

from polybus.dialects.freud.client.answer_batch import scan_answers
from polybus.dialects.freud.server.answer_encoder import encode_messages, encode_records
from polybus.dialects.freud.server.request_scanner import RequestScanner
from tests.rig.oracle.freud import is_name
from tests.unit.kernel.fence import PAGE, fenced
from tests.vectors.freud import MAX_FRAME_BYTES, vectors


def streams() -> list[bytes]:
    """Return every vector alone, and every third one as a run of three."""
    frames = [one.frame for one in (*vectors("client"), *vectors("server"))]
    return [*frames, *(frame * 3 for frame in frames[::3])]


def main() -> None:
    page = fenced()
    scanner = RequestScanner(MAX_FRAME_BYTES, is_name)
    for stream in streams():
        for size in range(len(stream) + 1):
            page[:size] = stream[:size]
            scanner.scan(page, 0, size)
            scan_answers(page, 0, size, MAX_FRAME_BYTES)
            page[PAGE - size :] = stream[:size]
            scanner.scan(page, PAGE - size, PAGE)
            scan_answers(page, PAGE - size, PAGE, MAX_FRAME_BYTES)
    page[:] = bytes(PAGE)
    for size in (0, 1, 7, 8, 15, 16, 33, 64, 65, 300, PAGE):
        offsets = array("i", [0, size])
        for bodies in (page[:size], page[PAGE - size :]):
            encode_messages(offsets, bodies, 0, 1)
        encode_records(0, page[PAGE - 8 :], 0, page[PAGE - 8 :], page[:0], 0, 1)
    sys.stdout.write("nothing outside was touched\n")


if __name__ == "__main__":
    main()
