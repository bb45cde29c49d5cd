"""What is measured, and what must hold.

The targets are ratios within one run, so they mean the same on any machine:
  - pipelined, at least 8 times nats-server at 16 and 128 B and on 200 topics, twice at 1 KiB
  - at least 0.6 of the raw relay at 128 B: most of the work is moving bytes, as it must be
  - 50 publishers that do not wait: 1.2 times the best of nats-server, redis and ZeroMQ; that wait
    for delivery: 1.1 times redis
  - one at a time: not behind the better of nats-server and redis, 0.8 of the raw relay at p50
"""

from bench.harness.results import P50, P99, RATE, Target
from bench.harness.rounds import Case
from bench.harness.workloads import Crowd, OneByOne, Streams

NATS, REDIS, ZEROMQ, RELAY = "nats-server", "redis", "ZeroMQ proxy", "raw relay"
NEAR_ONE_ROUNDS = 7  # of the cases whose target is near 1, where chance would decide with fewer
MIXED_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2000)  # the cap leaves 2037 bytes for "bench"

CASES = (
    Case("1-1-16", "1 → 1, 16 B", Streams(1, (16,))),
    Case("1-1-128", "1 → 1, 128 B", Streams(1, (128,))),
    Case("1-1-1024", "1 → 1, 1 KiB", Streams(1, (1024,))),
    Case("1-8-16", "1 → 8, 16 B", Streams(8, (16,))),
    Case("1-8-128", "1 → 8, 128 B", Streams(8, (128,))),
    Case("1-8-1024", "1 → 8, 1 KiB", Streams(8, (1024,))),
    Case("200-topics", "200 topics, 8 subscribers, half each, 16 B", Streams(8, (16,), 200)),
    Case("1000-topics", "1000 topics, 8 subscribers, half each, 16 B", Streams(8, (16,), 1000)),
    Case("mixed", "1 → 8, mixed sizes to 2000 B", Streams(8, MIXED_SIZES)),
    Case(
        "50-senders",
        "50 publishers, one frame per send, 16 B",
        Crowd(50, 16, in_turns=False),
        NEAR_ONE_ROUNDS,
    ),
    Case(
        "50-turns",
        "50 publishers, each waits for delivery, 16 B",
        Crowd(50, 16, in_turns=True),
        NEAR_ONE_ROUNDS,
    ),
    Case("latency", "latency, one at a time, 16 B", OneByOne(16), NEAR_ONE_ROUNDS),
)

TARGETS = (
    Target("1-1-16", RATE, (NATS,), 8),
    Target("1-1-128", RATE, (NATS,), 8),
    Target("1-1-1024", RATE, (NATS,), 2),
    Target("1-8-16", RATE, (NATS,), 8),
    Target("1-8-128", RATE, (NATS,), 8),
    Target("1-8-1024", RATE, (NATS,), 2),
    Target("200-topics", RATE, (NATS,), 8),
    Target("1-1-128", RATE, (RELAY,), 0.6),
    Target("1-8-128", RATE, (RELAY,), 0.6),
    Target("50-senders", RATE, (NATS, REDIS, ZEROMQ), 1.2),
    Target("50-turns", RATE, (REDIS,), 1.1),
    Target("latency", P50, (NATS, REDIS), 1.0),
    Target("latency", P99, (NATS, REDIS), 1.0),
    Target("latency", P50, (RELAY,), 0.8),
)
