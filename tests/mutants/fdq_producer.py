"""Breaks FDQ's producing side on purpose, and the bus inside a process; the tests must notice.

    python tests/mutants/fdq_producer.py [part of a mutant's name ...]

The same procedure as in bus.py.
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
        *(f"tests/unit/fdq/test_{name}.py" for name in ("message_batcher", "message_columns")),
        *(
            f"tests/unit/fdq/test_{name}.py"
            for name in ("shard_routing", "topic_replay", "producer")
        ),
        "tests/unit/fdq/test_aio.py",
        "tests/unit/port/test_anonymous_producers.py",
        "tests/unit/embedded",
    ),
    "live": ("tests/interop/test_fdq_producer.py",),
}

PRODUCER = [
    *mutants(
        "dialects/fdq/client/message_batcher.py",
        ("nothing is ever full", "self._rows >= options.max_batch_rows or", "False and"),
        ("batches without a bound", "batch.bytes + size > options.max_batch_bytes", "False"),
        (
            "a batch overtakes pending work",
            "with self._order:\n            self._drain()\n            with self._state:",
            "with self._order:\n            with self._state:",
        ),
        ("closed ones take more", 'raise ConnectionLost("producer is closed")', "pass"),
        (
            "answers send nothing",
            "self._is_flush_requested = True\n                    self._state.notify()",
            "pass",
        ),
        ("linger forever", "self._since_s + self._options.linger_s", "self._since_s + 1e9"),
        ("no peer is to send", "self._until_due_s() <= GRACE_S", "False"),
        (
            "the thread is not told",
            "not (self._in_flight and self._is_timed_wait)",
            "not self._in_flight",
        ),
        (
            "the first waits, too",
            "if self._is_flush_requested or not self._in_flight:",
            "if self._is_flush_requested:",
        ),
        (
            "failures are no peer's",
            "except Exception as error:  # any",
            "except ZeroDivisionError as error:  # any",
        ),
        (
            "called back, and waited for",
            'ConnectionLost("produce was cancelled") if done.cancelled() else ',
            "",
        ),
        ("headers are lost", "batch.has_headers = True", "pass"),
        ("headers come and go", "if batch.has_headers:", "if False:"),
        (
            "flush does not wait",
            "not self._in_flight and not self._pending, timeout_s",
            "True, timeout_s",
        ),
        ("sent though others travel", "is_free = not self._in_flight", "is_free = True"),
        (
            "can be called back",
            "            future.set_running_or_notify_cancel()  # a running future cannot be cancelled\n",
            "",
        ),
    ),
    *mutants(
        "dialects/fdq/client/envelope.py",
        ("long keys of single messages", "if size > MAX_KEY_BYTES:", "if False:"),
        ("large single messages", "if len(message) > MAX_MESSAGE_BYTES:", "if False:"),
        ("large headers", "if size > MAX_HEADER_BYTES:", "if False:"),
        (
            "key size counted in characters",
            'size = len(key) if key.isascii() else len(_encode(key, "shard key"))',
            "size = len(key)",
        ),
    ),
    *mutants(
        "dialects/fdq/client/message_columns.py",
        ("long keys in a batch", "if longest > MAX_KEY_BYTES:", "if False:"),
        ("large messages in a batch", "if largest > MAX_MESSAGE_BYTES:", "if False:"),
        ("bodies that are not bytes", "if set(map(type, bodies)) != {bytes}:", "if False:"),
        ("keys that are not text", "if not set(map(type, keys)) <= KEY_TYPES:", "if False:"),
        ("empty batches", "if not items:", "if False:"),
    ),
    *mutants(
        "dialects/fdq/client/producer.py",
        ("missing topics are made", "if not self._create:", "if False:"),
        (
            "a child of a fork goes on",
            "or self._pid != fork_guard.pid:\n            self.check_topic(topic)\n        # Nearly",
            "and True:\n            self.check_topic(topic)\n        # Nearly",
        ),
        ("not only ASCII is plainly right", "shard_key.isascii() and ", ""),
        (
            "the bus is not let go of",
            "self._pool.close(None if is_done else 0.0)\n        self._bus.close()",
            "self._pool.close(None if is_done else 0.0)",
        ),
    ),
    *mutants(
        "dialects/fdq/client/producer.py",
        (
            "a name for each topic",
            "if self._of_topic and not self._is_named:",
            "if self._of_topic:",
        ),
        ("lines without a bound", "if len(self._all) < MAX_PRODUCERS:", "if True:"),
        (
            "a topic changes its line",
            "            self._of_topic[topic] = producer\n",
            "            self._of_topic[str(len(self._of_topic))] = producer\n",
        ),
    ),
]

REPLAY = [
    *mutants(
        "dialects/fdq/client/topic_replay.py",
        ("it never ends", "if last is None and not wait_s:", "if False:"),
        ("ids are times", "if from_time is not None or isinstance(to, datetime):", "if True:"),
        (
            "the bus is kept",
            "self._reader.close()\n        self._bus.close()",
            "self._reader.close()",
        ),
        ("kept by who fails", "        bus.close()\n        raise", "        raise"),
    ),
    *mutants(
        "dialects/fdq/client/topic_replay.py",
        ("times without a zone", "if moment.tzinfo is None:", "if False:"),
        ("flags are numbers", "or isinstance(value, bool) ", ""),
    ),
    *mutants(
        "dialects/fdq/aio.py",
        ("closing waits for a blocked read", "self._inner.cancel()", "pass"),
        (
            "every caller opens a client",
            "if self._opening is None or not self.is_usable:",
            "if True:",
        ),
        ("a failed opening is final", " or not self.is_usable:", ":"),
        ("a closed producer opens again", "if self._client.is_closed:\n", "if False:\n"),
    ),
]

EMBEDDED = [
    *mutants(
        "native/inprocess/inprocess_bus.py",
        ("each his own", "if shared is None:", "if True:"),
        ("closed by the first", "if not shared.users:", "if True:"),
        ("never closed", "shared.core.close()", "pass"),
        ("the child has the parent's", "    _shared.clear()", "    pass"),
    ),
    *mutants(
        "store/lmdb/lmdb_engine.py",
        ("a path is a place", "folder = _folder(place).resolve()", "folder = _folder(place)"),
        ("a data folder is a store", "str(inner if is_data else folder)", "str(folder)"),
    ),
    *mutants(
        "native/inprocess/inprocess_transport.py",
        (
            "a child of a fork uses it",
            "        if os.getpid() != self.bus.pid:\n            pid",
            "        if False:\n            pid",
        ),
        ("closed ones go on", 'raise ConnectionLost("the client is closed")', "pass"),
        (
            "a closed client reports the store",
            "        except StoreClosed:\n            self.check_open()\n",
            "        except StoreClosed:\n",
        ),
        (
            "waiting callers sleep on",
            "        self.bus.port.waits.check_callers()\n        self._on_close()",
            "        self._on_close()",
        ),
        ("counted twice", "            if self.closed.is_set():\n                return\n", ""),
        (
            "nothing is carried",
            "decoded: dict[str, Any] = json.loads(json.dumps(given))",
            "decoded: dict[str, Any] = dict(given)",
        ),
    ),
    *mutants(
        "native/inprocess/inprocess_transport.py",
        (
            "without a stamp",
            "stream.produce(block, stamp, call.delivery)",
            "stream.produce(block, None, call.delivery)",
        ),
        ("no end of what travels", "self._closed_by or self._in_flight < MAX_IN_FLIGHT", "True"),
        ("fenced ones go on", "self._closed_by = self._closed_by or error", "pass"),
        ("large batches", "if batch.nbytes > most:", "if False:"),
        (
            "told by the store's thread",
            "self._bus.answers.add(partial(on_stored, done))",
            "on_stored(done)",
        ),
    ),
    *mutants(
        "native/client/native_producer.py",
        ("not forgotten", "and self._ends_on_bus:", "and False:"),
    ),
    *mutants(
        "native/inprocess/inprocess_transport.py",
        ("cancelling is not heard", "        self._cancelled = True\n", ""),
    ),
    *mutants(
        "native/client/range_reader.py",
        ("following ends", "if time.monotonic() - last_s >= self._wait_s:", "if True:"),
    ),
]

SIGHTINGS = mutants(
    "native/port/producer_registry.py",
    ("forgotten a day early", "EXPIRY_S: Final = 8 * DAY_S", "EXPIRY_S: Final = 7 * DAY_S"),
    (
        "named producers expire",
        "if not ANONYMOUS.fullmatch(producer):\n            return ()\n        if len",
        "if len",
    ),
    (
        "uses are not recorded",
        "            self._store.commit(Commit(changes=changes))\n\n    def delete",
        "            pass\n\n    def delete",
    ),
    (
        "each use is written",
        "if recorded_s is not None and self._clock() - recorded_s < DAY_S:",
        "if False:",
    ),
    (
        "the wall clock alone",
        "if recorded_s is not None and self._clock() - recorded_s < EXPIRY_S:",
        "if False:",
    ),
    (
        "looked at all the time",
        "if self._scanned_s is not None and now_s - self._scanned_s < SCAN_INTERVAL_S:",
        "if False:",
    ),
    (
        "only the first are looked at",
        'records[-1].key if len(records) == SCAN_LIMIT else b""',
        'b""',
    ),
)

ALL = [*PRODUCER, *REPLAY, *EMBEDDED, *SIGHTINGS]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-fdq-producer"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
