"""What is measured, and what must hold.

- durable produce, 4 processes with batches of 1000: at least 3 times JetStream and Redis Streams;
  beside it, without a target, the same with each waiting for its batch before the next
- a group of 4 that takes batches: at least 0.5 of the port's plain read by as many processes
- message by message: at least 100 000 a second in one process
- end to end at 1000 messages a second: p50 under 5 ms; p99 at most 10 ms and 4 times that of
  fdatasync in the same run
"""

from bench.harness.results import P50, P99, RATE, US_PER_MS, Ceiling, Requirement, Target
from bench.harness.results import Floor as AtLeast
from bench.peers import jetstream, redis_streams
from bench.store.rounds import Case

PROCESSES = 4
WINDOW = 16  # batches of one producer in flight, as many as FDQ's client has
PEERS_MANY = 32  # producers of a peer; JetStream takes 50 batches at once
BATCH_MESSAGES = 1000
KEYS = 1000  # customers
PLAIN, DISK = "plain read", "fdatasync"

PRODUCE = Case("fdq-produce", "durable produce, 4 processes × 1000, 128 B", (RATE,))
WAITING = Case("fdq-waiting", "the same, one batch at a time each", (RATE,))
BATCHES = Case("fdq-batches", "group of 4 that has settled, batch=True, 128 B", (RATE,))
SINGLES = Case("fdq-singles", "message by message, one process, 128 B", (RATE,))
LATENCY = Case("fdq-latency", "end to end at 1000 messages/s, 128 B", (P50, P99))
CASES = (PRODUCE, WAITING, BATCHES, SINGLES, LATENCY)

REQUIREMENTS: tuple[Requirement, ...] = (
    Target(PRODUCE.name, RATE, (jetstream.NAME,), 3.0),
    Target(PRODUCE.name, RATE, (redis_streams.NAME,), 3.0),
    Target(BATCHES.name, RATE, (PLAIN,), 0.5),
    AtLeast(SINGLES.name, RATE, 1e5),
    Ceiling(LATENCY.name, P50, 5 * US_PER_MS),
    Ceiling(LATENCY.name, P99, 10 * US_PER_MS, DISK, 4.0),
)
