"""What is measured, and what must hold.

- durable produce, 4 processes with batches of 1000: at least 3 times JetStream, and 0.6 of the
  same port without a store behind it
- 128 producers with one message at a time: at least 0.6 of the port without a store
- reads of blocks of 1000 messages: at least 5 million a second
- rqueue's p99 with all that beside it: at most 5 times that without
"""

from bench.harness.results import P50, P99, RATE, Floor, Requirement, Target
from bench.native.contenders import ALONE, CEILING
from bench.peers import jetstream
from bench.store.rounds import Case

PROCESSES = 4
BATCH_MESSAGES, WINDOW = 1000, 16
STREAMS = 32  # of each process, with one message at a time: 128 producers

BATCHES = Case("native-batches", "durable produce, 4 processes × 1000, 128 B", (RATE,))
SINGLES = Case("native-singles", "durable produce, 128 producers × 1, 128 B", (RATE,))
READ = Case("native-read", "read over the port, blocks of 1000, 128 B", (RATE,))
BESIDE = Case("native-beside", "rqueue latency, full native load beside it", (P50, P99))
CASES = (BATCHES, SINGLES, READ, BESIDE)

REQUIREMENTS: tuple[Requirement, ...] = (
    Target(BATCHES.name, RATE, (jetstream.NAME,), 3.0),
    Target(BATCHES.name, RATE, (CEILING,), 0.6),
    Target(SINGLES.name, RATE, (CEILING,), 0.6),
    Floor(READ.name, RATE, 5e6),
    Target(BESIDE.name, P99, (ALONE,), 0.2),
)
