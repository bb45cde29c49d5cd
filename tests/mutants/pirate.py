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
    ("any version is accepted", "if version != VERSION:", "if False:"),
    ("any op is accepted", "if op not in OPS:", "if False:"),
    ("client ids are unbounded", "if not 1 <= len(client) <= MAX_CLIENT_BYTES:", "if not client:"),
    (
        "client ids may be empty",
        "if not 1 <= len(client) <= MAX_CLIENT_BYTES:",
        "if len(client) > 64:",
    ),
    ("GET's counter is checked", " and op != GET):", "):"),
    ("HELLO may have an epoch", "if own or topic or int.from_bytes(epoch):", "if own or topic:"),
    ("HELLO may have own frames", "if own or topic or int.from_bytes(epoch):", "if topic:"),
    ("LAST may have any size", "if len(own) != 1 or len(own[0]) != NUMBER_BYTES:", "if not own:"),
    (
        "PUT may have no body",
        '    if not own:\n        return ErrorReply(MALFORMED, "PUT',
        '    if False:\n        return ErrorReply(MALFORMED, "PUT',
    ),
    ("body frames are unbounded", "if len(frame) > MAX_FRAME_BYTES:", "if False:"),
    (
        "bodies may have one byte more",
        "if size > MAX_MESSAGE_BYTES:",
        "if size > MAX_MESSAGE_BYTES + 1:",
    ),
    ("frames are one byte short", "start + MAX_FRAME_BYTES])", "start + MAX_FRAME_BYTES - 1])"),
    (
        "the last empty frame ends the envelope",
        'place = frames.index(b"")',
        'place = len(frames) - 1 - frames[::-1].index(b"")',
    ),
)

SESSION = mutants(
    "dialects/pirate/server/session.py",
    (
        "messages without envelope are not counted",
        '            self._counters.count("dropped", "pirate_no_envelope")\n',
        "",
    ),
    (
        "refusals are not counted",
        '        self._counters.count("refused", f"pirate_{code.lower()}")\n',
        "",
    ),
    (
        "GET answers NO_TOPIC",
        "codec.NOT_SUBSCRIBED if op == codec.GET else codec.NO_TOPIC",
        "codec.NO_TOPIC",
    ),
    ("STALE is answered as BUSY", "    (Stale, codec.STALE),\n", ""),
    ("the envelope is truncated", "envelope = frames[:end]", "envelope = frames[:1]"),
)

CLIENTS = mutants(
    "dialects/pirate/server/client_table.py",
    (
        "a repeated HELLO is not recognised",
        "epoch = history.epoch_of(self._number)",
        "epoch = None",
    ),
    (
        "HELLO answers counter 0",
        "then(HelloResult(epoch, client.counter))",
        "then(HelloResult(epoch, 0))",
    ),
    ("epochs are not checked", "return request.epoch != self.epoch\n", "return False\n"),
    (
        "only older epochs are fenced",
        "return request.epoch != self.epoch\n",
        "return request.epoch < self.epoch\n",
    ),
    (
        "every HELLO gets the newest epoch",
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
        ("LAST above the newest id is accepted", "if request.last > newest:", "if False:"),
        (
            "LAST at the newest id is refused",
            "if request.last > newest:",
            "if request.last >= newest:",
        ),
        ("LAST is not stored", "if subscription.saved < last:", "if False:"),
        ("LAST of a removed subscription is stored", "if self._table.find(*one.key) is one]", "]"),
        ("one commit for each turn", "        if not self._commits:\n", "        if True:\n"),
    ),
    *mutants(
        "dialects/pirate/server/get_handler.py",
        (
            "GET returns the message at LAST",
            "at = bisect_right(self.ids, last)",
            "at = bisect_right(self.ids, last - 1)",
        ),
        ("the cache returns past its end", "if cached.high <= last:", "if cached.high < last:"),
    ),
    *mutants(
        "dialects/pirate/server/read_retention.py",
        (
            "one message too many is trimmed",
            "return store.find_id(topic.number, shard, read + 1)",
            "return store.find_id(topic.number, shard, read + 2)",
        ),
        (
            "the fastest subscriber decides",
            "RetentionTask(topic, self._table.read_by_all(number))",
            "RetentionTask(topic, max((one.saved for one in self._table if one.key.topic == number), default=None))",
        ),
        (
            "nothing is trimmed",
            "                store.trim(task.topic.number, before)\n",
            "                pass\n",
        ),
    ),
]

SUBSCRIBING = [
    *mutants(
        "dialects/pirate/server/subscribe_handler.py",
        (
            "SUB starts at id 0",
            "newest = self._context.durable.next_id(topic) - 1",
            "newest = 0",
        ),
        (
            "a second SUB moves LAST",
            "encode_number(existing.last), then",
            "encode_number(self._context.durable.next_id(topic) - 1), then",
        ),
        (
            "UNSUB always answers 1",
            "self._commit_counter(client, request, encode_number(0), then)",
            "self._commit_counter(client, request, encode_number(1), then)",
        ),
        ("unused topics stay", "                    self.remove_unused(topic)\n", ""),
        (
            "a drop ends a newer subscription",
            "[one for one in subscriptions if self._table.find(*one.key) is one]",
            "list(subscriptions)",
        ),
        (
            "repeats are executed again",
            "if request.counter > client.counter:",
            "if True:",
        ),
    ),
    *mutants(
        "dialects/pirate/server/subscriber_records.py",
        ("the digest ignores the body", "    digest.update(body)\n", ""),
        (
            "one HELLO number is known",
            "MAX_HELLO_NUMBERS: Final = 1024",
            "MAX_HELLO_NUMBERS: Final = 1",
        ),
        ("two results are kept", "kept_results=1", "kept_results=2"),
    ),
    *mutants(
        "dialects/pirate/server/get_handler.py",
        (
            "parallel reads are unbounded",
            "if not self._queued_reads or started >= MAX_PARALLEL_READS:",
            "if not self._queued_reads:",
        ),
        (
            "queued reads are not started",
            "        self._start_read()\n        for then",
            "        for then",
        ),
    ),
    *mutants(
        "dialects/pirate/server/subscriber_records.py",
        (
            "stored refusals are answered as 0",
            'return error_from_code(code.decode(), text.decode("utf-8", "replace"))',
            "return 0",
        ),
    ),
    *mutants(
        "transports/zmq/memory_watch.py",
        (
            "a connection has no bound",
            "if connection.unfinished > bounds.max_unfinished and not self._has_waiting():",
            "if False:",
        ),
        (
            "the total has no bound",
            "if max(unfinished, grown) > self._bounds.max_unread:",
            "if False:",
        ),
        (
            "bytes after a message do not count",
            "(is_new and held <= HANDSHAKE_BYTES)",
            "is_new",
        ),
        (
            "heartbeats count as messages",
            "held - round(HEARTBEAT_BYTES_PER_S * (now_s - connection.baseline_s))",
            "held",
        ),
        (
            "sent bytes count at the next check only",
            "        self._unacknowledged_bytes += size\n",
            "        pass\n",
        ),
        (
            "process memory does not count",
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
