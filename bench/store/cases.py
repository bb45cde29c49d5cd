"""What is measured, and what must hold.

- durable commits, 16 producers × 100 messages: at least 0.4 of appending the same bytes to a file
  and syncing them, 3 times JetStream and 3 times Redis Streams
- 128 producers × 1 message: at least 15 times LMDB with a transaction each
- reads into Arrow from blocks of 1000 messages: at least 20 million a second; of a topic written
  one message at a time, after re-blocking: at least half of that, with at most 1.3 times the bytes
"""

from bench.harness.results import RATE, Floor, Requirement, Target
from bench.peers import jetstream, redis_streams
from bench.store.log_appends import LOG
from bench.store.reading import BYTES
from bench.store.rounds import Case
from bench.store.writing import APPEND, LMDB

IN_BLOCKS = "blocks of 1000"

BATCHES = Case("batches", "durable commits, 16 producers × 100, 128 B", (RATE,))
SINGLES = Case("singles", "durable commits, 128 producers × 1, 128 B", (RATE,))
READ = Case("read", "read into Arrow, blocks of 1000, 128 B", (RATE, BYTES))
REBLOCKED = Case(
    "reblocked", "read into Arrow, written one by one by 16, re-blocked", (RATE, BYTES)
)
CASES = (BATCHES, SINGLES, LOG, READ, REBLOCKED)

REQUIREMENTS: tuple[Requirement, ...] = (
    Target(BATCHES.name, RATE, (APPEND,), 0.4),
    Target(BATCHES.name, RATE, (jetstream.NAME,), 3.0),
    Target(BATCHES.name, RATE, (redis_streams.NAME,), 3.0),
    Target(SINGLES.name, RATE, (LMDB,), 15.0),
    Floor(READ.name, RATE, 20e6),
    Target(REBLOCKED.name, RATE, (IN_BLOCKS,), 0.5),
    Target(REBLOCKED.name, BYTES, (IN_BLOCKS,), 1 / 1.3),
)
