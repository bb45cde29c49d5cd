"""Opens, cuts and gathers blocks that lie against a page which may not be touched.

One read before the start or past the end, even by a byte, ends this process with
SIGSEGV. test_blocks.py runs it as a process of its own for that reason.
"""

from __future__ import annotations

import sys
from itertools import product

from polybus.kernel import block_gather
from polybus.kernel import blocks as kernel
from polybus.model import run_table
from tests.rig.oracle import blocks as oracle
from tests.unit.kernel.fence import fenced
from tests.vectors.block import vectors


def samples() -> list[bytes]:
    """The golden blocks, blocks of up to 20 messages, and their headers with wild sizes."""
    found = [one.data for one in vectors()]
    for count, keys, maps in product(range(1, 20), (1, 2, 3), (1, 2, 3)):
        found.append(
            oracle.encode(
                [
                    oracle.Message(
                        at,
                        bytes(at % 9),
                        None if at % keys else b"k" * (at % 9),
                        None if at % maps else ((b"n" * (at % 9), b"v"),) * (at % 2),
                    )
                    for at in range(count)
                ]
            )
        )
    wild = [0, 1, 7, 8, 255, 2**31 - 1, 2**31, 2**32 - 1]
    for data, number, size in product(found[-9::4], range(3, 11), wild):
        fields = list(oracle.HEADER.unpack(data[:48]))
        fields[number] = size & (0xFFFF if number == 3 else 2**32 - 1)
        found.append(oracle.resealed(oracle.HEADER.pack(*fields) + data[48:]))
    return found


def look(data: memoryview) -> None:
    for checksum in (True, False):
        try:
            layout = kernel.Layout(data, checksum=checksum)
        except kernel.BadBlock:
            continue
        count = layout.count
        kernel.concat([layout, layout])
        for start in range(count):
            kernel.cut(layout, start, count)
            piece = (layout, run_table.make_table(1, 0, count), 0, 0, start, count)
            block_gather.gather([piece], 0, 2**62, count, 1 << 20)
        layout.close()


def main() -> None:
    page = fenced()
    every = [one for one in samples() if len(one) <= len(page)]
    for data in every:
        for place in (slice(0, len(data)), slice(len(page) - len(data), len(page))):
            page[place] = data
            look(page[place])
            kernel.xxh64(page[place])
    sys.stdout.write(f"looked at {len(every)} blocks\n")


if __name__ == "__main__":
    main()
