"""Reads GSB's packets that lie between two pages which may not be touched.

See forbidden_pages.py; test_gsb_memory.py runs this as a process of its own.
"""

from __future__ import annotations

import sys

from polybus.dialects.gsb import gsb_packets, sp
from tests.rig.gsb_memory_peer import MemoryPeer
from tests.rig.memory_bus import MemoryBus
from tests.unit.kernel.fence import PAGE, fenced
from tests.vectors.gsb import VECTORS


def main() -> None:
    page = fenced()
    for vector in VECTORS:
        payload = vector.payload
        for size in range(len(payload) + 1):
            page[:size] = payload[:size]
            gsb_packets.read(page, 0, size)
            page[PAGE - size :] = payload[:size]
            gsb_packets.read(page, PAGE - size, PAGE)
    for form in ("tcp", "ipc"):
        for vector in VECTORS:
            stream = sp.GREETING + 2 * getattr(vector, form)
            for size in range(len(stream) + 1):
                session = MemoryPeer(MemoryBus(), is_unix=form == "ipc").session
                page[PAGE - size :] = stream[:size]
                session.receive(page, PAGE - size + min(size, len(sp.GREETING)), PAGE)
    sys.stdout.write("nothing outside was touched\n")


if __name__ == "__main__":
    main()
