"""Breaks the native port on purpose, and demands that its tests notice.

    python tests/mutants/port.py [part of a mutant's name ...]

The same procedure as in bus.py, with unit tests alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants import bus  # noqa: E402
from tests.mutants.bus import mutants  # noqa: E402

SUITES: dict[str, tuple[str, ...]] = {
    "unit": ("tests/unit/port", "tests/unit/flight", "tests/unit/server/test_loop_threads.py"),
}

WAITS = mutants(
    "native/port/shard_waits.py",
    (
        "shards without end",
        "self._position_shares.take(wait.identity, len(wait.places))",
        "self._position_shares.take(wait.identity, 0)",
    ),
    (
        "places are not given back",
        "self._position_shares.release(wait.identity.account_name, len(wait.places))",
        "pass",
    ),
    (
        "news wakes no peer",
        "                self._wake((end.topic, end.shard))",
        "                pass",
    ),
    ("the gone stay", "wait.is_abandoned = True", "pass"),
    (
        "no end when the bus stops",
        "for wait in self._waits:\n                wait.news = None\n                wait.event.set()",
        "pass",
    ),
    ("a wake checks no place", "wait.news.add(place)", "pass"),
    ("what was seen is news", "if ends[topic][shard] > offset", "if ends[topic][shard] >= offset"),
    ("a drop wakes no peer", "self._wake((topic.number, shard))", "pass"),
)

BUDGET = mutants(
    "native/port/produce_stream.py",
    ("no turns", "self._queue[0] is turn and ", ""),
    ("room is kept", "future.add_done_callback(lambda _: self._release(size))", "pass"),
    (
        "failures keep room",
        "        except BaseException:\n            self._release(size)",
        "        except BaseException:",
    ),
    ("too large waits forever", "if size > self._max_bytes:", "if False:"),
)

OWNERS = mutants(
    "native/port/producer_registry.py",
    ("producers are shared by all", "if owner != caller.name.encode():", "if False:"),
    ("the last one owns it", "expected=0)", "expected=None)"),
    ("owners are remembered forever", "self._known.pop(producer, None)", "pass"),
)

DURABLE = mutants(
    "durable/topic_registry.py",
    ("quotas are not charged", "fits = known + size <= limit", "fits = True"),
    ("in-flight work does not count", "self._in_flight_bytes.get(topic.number, 0) + ", ""),
    ("it is in flight forever", "self.add_in_flight(topic, -block.size_bytes)", "None"),
    ("all to the first shard", "turn = self._next_run", "turn = 0"),
    ("ids stand still", "self.advance(span.topic, span.first_id + span.count)", "pass"),
)

BINDING = mutants(
    "durable/topic_names.py",
    ("claims are shared", "in self._claimed:\n            raise", "in ():\n            raise"),
    ("claims do not end", "self._claimed.discard(topic.number)", "pass"),
    ("any peer may claim", "self.check_allowed(caller, DELETE, name)", "pass"),
    (
        "both kinds at once",
        "if self._is_ephemeral(topic_name.check_topic_name(name)):\n            raise",
        "if False:\n            raise",
    ),
    ("quotas are kept", "self._quotas.release(reservation.owner, TOPICS, 1)", "pass"),
)

STATS = mutants(
    "native/port/topic_statistics.py",
    (
        "one group alone is counted",
        "counts[key] += group_shard[key]",
        "counts[key] = group_shard[key]",
    ),
    ("trimmed is not told", "shard.start, shard.size_bytes)", "0, shard.size_bytes)"),
    (
        "what was trimmed was never there",
        "(shard.end, shard.end,",
        "(shard.end - shard.start, shard.end,",
    ),
    ("the quickest shard is the group's", "slowest_s = max(", "slowest_s = min("),
    ("queries are left out", '"queries": list(queries)', '"queries": []'),
)

FLIGHT = [
    *mutants(
        "transports/flight/put_intake.py",
        ("batches of any size", "if size > self._max_batch_bytes:", "if False:"),
        ("refusals are not counted", "        self._on_error(error)\n", ""),
        ("stamps are not read", "            if metadata:", "            if False:"),
        ("errors are reported as outcomes", "outcome.result())", "outcome.exception())"),
        ("the port is not told", "            self._queue.wake()\n", "            pass\n"),
        ("any encoding", 'str(raw, "utf-8")', "raw"),
        ("all wait for one", " or not target.is_ready():", ":"),
        ("a stream overtakes itself", "self._slow_path.has_batches(id(target)) or ", ""),
    ),
    *mutants(
        "transports/flight/slow_consumers.py",
        ("no peer is cut", "self._cut(send.peer)", "pass"),
        ("cut again and again", "send.is_cut = True", "pass"),
        ("slow links are cut", "if moved > 0 and moved", "if False and moved"),
        ("a drop is enough", "and moved >= self._min_bytes_per_s * (now_s - send.noted_s)", ""),
    ),
    *mutants(
        "transports/flight/put_intake.py",
        (
            "streams stay aside",
            "                    if left:\n                        self._held[stream] = left\n                    else:\n                        del",
            "                    if True:\n                        self._held[stream] = left\n                    else:\n                        del",
        ),
        (
            "the second goes first",
            "                    if left:\n",
            "                    if False:\n",
        ),
    ),
    *mutants(
        "transports/flight/flight_listener.py",
        (
            "a new certificate is not used",
            "        self._front.use_certificate(tls.context)\n",
            "",
        ),
    ),
    *mutants(
        "transports/flight/call_tracker.py",
        ("stopping refuses no peer", "if self._stopping:", "if False:"),
        (
            "what could not begin goes on",
            "        except BaseException:\n            self.end_call()\n            raise",
            "        except BaseException:\n            raise",
        ),
    ),
    *mutants(
        "server/loop_threads.py",
        ("late outcomes", "if not outcome.set_running_or_notify_cancel():", "if False:"),
    ),
]

ALL = [*WAITS, *BUDGET, *OWNERS, *DURABLE, *BINDING, *STATS, *FLIGHT]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-port"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
