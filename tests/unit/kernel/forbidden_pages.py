"""Routes buffers that lie between two pages which may not be touched.

One read before the start or past the end, even by a byte, ends this process with
SIGSEGV. test_memory.py runs it as a process of its own for that reason.
"""

from __future__ import annotations

import sys
from array import array

from polybus.dialects.rqueue.server.rqueue_framing import RqueueEncoding, RqueueFraming
from polybus.kernel.fanout import Fanout, Source
from tests.property.kernel.frames import filler, frame, publish, publish_part, remove, subscribe
from tests.unit.kernel.fence import PAGE, fenced

TOPICS = (b"x", b"1234567", b"12345678", b"123456789", b"t" * 255)


def prepared() -> Fanout:
    fanout = Fanout(lambda identity, topic: True)
    fanout.has_produce_rules = True
    for number in (0, 1):
        encoding = RqueueEncoding(number, 282 + 100 * number)
        reader = fanout.add_subscriber(number, encoding)
        for topic in TOPICS[number:]:
            fanout.subscribe(reader, topic)
    fanout.set_collect(TOPICS[2], True)
    return fanout


def streams() -> list[bytes]:
    frames = [publish(topic, filler(size)) for topic in TOPICS for size in (0, 1, 7, 8, 20)]
    frames += [publish(b"unheard" + bytes(size), b"") for size in range(9)]
    frames += [publish_part(topic, 0, 1, b"") for topic in TOPICS]
    frames += [form(topic) for form in (subscribe, remove) for topic in TOPICS]
    # Shorter than their headers announce, at the end of the page.
    frames += [frame(kind, bytes(size)) for kind in (0, 1, 2, 5) for size in range(8)]
    frames += [
        frame(0, frame(kind, b"\x01t" + bytes(size))) for kind in (7, 8) for size in range(21)
    ]
    return [*frames, *(one * 2 for one in frames[::7])]


def main() -> None:
    page = fenced()
    fanout = prepared()
    framing, source = RqueueFraming(RqueueEncoding(0, 282)), Source(0)
    for stream in streams():
        for size in range(len(stream) + 1):
            page[:size] = stream[:size]
            fanout.route(framing, source, page, 0, size)
            page[PAGE - size :] = stream[:size]
            fanout.route(framing, source, page, PAGE - size, PAGE)
    for size in (0, 1, 8, 300, PAGE):
        fanout.publish(source, TOPICS[2], array("i", [0, size]), page[PAGE - size :])
        fanout.publish(source, TOPICS[1], array("i", [0, size]), page[:size])
    sys.stdout.write("nothing outside was touched\n")


if __name__ == "__main__":
    main()
