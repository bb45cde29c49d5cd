"""Breaks pirate's codec, session and subscribers on purpose, and demands that tests notice.

    python tests/mutants/pirate.py [--unit | --live] [part of a mutant's name ...]

The same procedure as in bus.py: first the codec and subscribers in memory, then a real bus.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants import bus  # noqa: E402
from tests.mutants.bus import mutants  # noqa: E402

SUITES: dict[str, tuple[str, ...]] = {
    "unit": (
        "tests/unit/pirate/server",
        "tests/unit/zmq/test_memory_watch.py",
        "tests/unit/pirate/test_codec.py",
        "tests/property/pirate/test_pirate_codec.py",
    ),
    "live": (
        "tests/faults/test_pirate_memories.py",
        "tests/property/pirate/test_pirate_model.py",
        "tests/faults/test_pirate_bad_input.py",
    ),
}

CODEC = mutants(
    "dialects/pirate/codec.py",
    ("any version", "if version != VERSION:", "if False:"),
    ("any op", "if op not in OPS:", "if False:"),
    ("ids without end", "if not 1 <= len(client) <= MAX_CLIENT_BYTES:", "if not client:"),
    ("ids of nothing", "if not 1 <= len(client) <= MAX_CLIENT_BYTES:", "if len(client) > 64:"),
    ("GET's counter is looked at", " and op != GET):", "):"),
    ("HELLO with an epoch", "if own or topic or int.from_bytes(epoch):", "if own or topic:"),
    ("HELLO with more", "if own or topic or int.from_bytes(epoch):", "if topic:"),
    ("LAST of any size", "if len(own) != 1 or len(own[0]) != NUMBER_BYTES:", "if not own:"),
    (
        "PUT of nothing",
        '    if not own:\n        return ErrorReply(MALFORMED, "PUT',
        '    if False:\n        return ErrorReply(MALFORMED, "PUT',
    ),
    ("frames of any size", "if len(frame) > MAX_FRAME_BYTES:", "if False:"),
    ("one byte more", "if size > MAX_MESSAGE_BYTES:", "if size > MAX_MESSAGE_BYTES + 1:"),
    ("a frame is a byte short", "start + MAX_FRAME_BYTES])", "start + MAX_FRAME_BYTES - 1])"),
    (
        "the last empty frame is the one",
        'place = frames.index(b"")',
        'place = len(frames) - 1 - frames[::-1].index(b"")',
    ),
)

SESSION = mutants(
    "dialects/pirate/server/session.py",
    (
        "what has no envelope is not counted",
        '            self._counters.count("dropped", "pirate_no_envelope")\n',
        "",
    ),
    (
        "refusals are not counted",
        '        self._counters.count("refused", f"pirate_{code.lower()}")\n',
        "",
    ),
    (
        "GET finds no topic",
        "codec.NOT_SUBSCRIBED if op == codec.GET else codec.NO_TOPIC",
        "codec.NO_TOPIC",
    ),
    ("STALE is BUSY", "    (Stale, codec.STALE),\n", ""),
    ("the envelope is cut", "envelope = frames[:end]", "envelope = frames[:1]"),
)

CLIENTS = mutants(
    "dialects/pirate/server/client_table.py",
    ("a HELLO is none", "epoch = history.epoch_of(number)", "epoch = None"),
    (
        "HELLO forgets the counter",
        "then(HelloResult(epoch, client.counter))",
        "then(HelloResult(epoch, 0))",
    ),
    ("epochs are not looked at", "return request.epoch != self.epoch\n", "return False\n"),
    (
        "older epochs only",
        "return request.epoch != self.epoch\n",
        "return request.epoch < self.epoch\n",
    ),
    (
        "the newest for every HELLO",
        "then(HelloResult(epoch, client.counter))",
        "then(HelloResult(client.epoch, client.counter))",
    ),
)

READING = [
    *mutants(
        "dialects/pirate/server/get_handler.py",
        (
            "LAST goes back",
            "subscription.last = last = max(subscription.last, request.last)",
            "subscription.last = last = request.last",
        ),
        ("LAST from the future", "if request.last > newest:", "if False:"),
        (
            "the newest is from the future",
            "if request.last > newest:",
            "if request.last >= newest:",
        ),
        ("answered before it is on disk", "if subscription.saved >= last:", "if True:"),
    ),
    *mutants(
        "dialects/pirate/server/get_handler.py",
        (
            "the same again",
            "at = bisect_right(self.ids, last)",
            "at = bisect_right(self.ids, last - 1)",
        ),
        ("beyond what is at hand", "if cached.high <= last:", "if cached.high < last:"),
    ),
    *mutants(
        "dialects/pirate/server/read_retention.py",
        (
            "one too many goes",
            "== read + 1:\n            return guess",
            "== read + 1:\n            return guess + 1",
        ),
        (
            "the quickest decides",
            "RetentionTask(topic, self._table.read_by_all(number))",
            "RetentionTask(topic, max((one.saved for one in self._table if one.key.topic == number), default=None))",
        ),
        (
            "nothing goes",
            "                store.trim(task.topic.number, before)\n",
            "                pass\n",
        ),
    ),
]

SUBSCRIBING = [
    *mutants(
        "dialects/pirate/server/subscribe_handler.py",
        (
            "SUB begins at the beginning",
            "newest = self._context.durable.next_id(topic) - 1",
            "newest = 0",
        ),
        (
            "SUB again moves",
            "encode_number(existing.last), then",
            "encode_number(self._context.durable.next_id(topic) - 1), then",
        ),
        (
            "UNSUB is always done",
            "self._commit_counter(client, request, encode_number(0), then)",
            "self._commit_counter(client, request, encode_number(1), then)",
        ),
        ("topics stay", "                    self.remove_unused(topic)\n", ""),
        (
            "a drop takes a peer that came since",
            "[one for one in subscriptions if self._table.find(*one.key) is one]",
            "list(subscriptions)",
        ),
        (
            "repeats are done again",
            "if request.counter > client.counter:",
            "if True:",
        ),
    ),
    *mutants(
        "dialects/pirate/server/subscriber_records.py",
        ("any body is the same", "    digest.update(body)\n", ""),
        ("few starts are known", "MAX_HELLO_NUMBERS: Final = 1024", "MAX_HELLO_NUMBERS: Final = 1"),
        ("no kept result", "kept_results=1", "kept_results=2"),
    ),
    *mutants(
        "dialects/pirate/server/get_handler.py",
        (
            "reads have no bound",
            "if not self._queued_reads or started >= MAX_PARALLEL_READS:",
            "if not self._queued_reads:",
        ),
        ("reads stop", "        self._start_read()\n        for then", "        for then"),
    ),
    *mutants(
        "dialects/pirate/server/subscriber_records.py",
        (
            "refusals are forgotten",
            'return error_from_code(code.decode(), text.decode("utf-8", "replace"))',
            "return 0",
        ),
    ),
    *mutants(
        "transports/zmq/memory_watch.py",
        (
            "one is never too much",
            "if connection.unfinished > bounds.max_unfinished and not self._has_waiting():",
            "if False:",
        ),
        (
            "all are never too much",
            "if max(unfinished, grown) > self._bounds.max_unread:",
            "if False:",
        ),
        (
            "pending work behind a message is free",
            "(is_new and held <= HANDSHAKE_BYTES)",
            "is_new",
        ),
        (
            "heartbeats are messages",
            "held - round(HEARTBEAT_BYTES_PER_S * (now_s - connection.baseline_s))",
            "held",
        ),
        (
            "what was sent is seen late",
            "        self._unacknowledged_bytes += size\n",
            "        pass\n",
        ),
        (
            "weight is not seen",
            "if max(unfinished, grown) > self._bounds.max_unread:",
            "if unfinished > self._bounds.max_unread:",
        ),
    ),
]

ALL = [*CODEC, *SESSION, *CLIENTS, *READING, *SUBSCRIBING]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-pirate"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
