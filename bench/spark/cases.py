"""The cases and their targets: ratios of rows per second in one run, `local[2]`, warm.

- a full scan, `sum(length(body))`, straight from the files: at least 0.75 of Spark's own Parquet
  reader over the same rows
- the same through a bus: at least 0.6 of the Parquet reader

  Both run the same query and read the one column that it needs: Spark prunes the columns of
  Parquet, our optimizer rule those of a topic.
- the same, compared with a source that yields tuples and reads all columns: at least 2.5 times as
  fast
- a query that needs all ten columns, without a target, beside the Parquet reader
- a write: at least 0.6 of a Parquet write of the same rows; without a target, rows with keys, which
  go to 16 shards
- topic to topic, with a trigger of zero seconds: p50 at most 250 ms
"""

from bench.harness.results import P50, P99, RATE, US_PER_MS, Ceiling, Requirement, Target
from bench.store.rounds import Case

MESSAGES, SHORT_MESSAGES = 2_000_000, 500_000
PARQUET, TUPLES = "Parquet", "tuples"

FILES = Case("spark-files", "Spark: full scan from the files, 128 B", (RATE,))
BUS = Case("spark-bus", "Spark: full scan through a bus, 128 B", (RATE,))
SLOW = Case("spark-tuples", "Spark: the same, beside a source of tuples", (RATE,))
EVERY = Case("spark-columns", "Spark: a query of all columns, from the files", (RATE,))
SINK = Case("spark-sink", "Spark: write, 128 B", (RATE,))
KEYED = Case("spark-keyed", "Spark: write with keys, 128 B", (RATE,))
LATENCY = Case("spark-latency", "Spark: topic → topic, zero-second trigger", (P50, P99))
CASES = (FILES, BUS, SLOW, EVERY, SINK, KEYED, LATENCY)

REQUIREMENTS: tuple[Requirement, ...] = (
    Target(FILES.name, RATE, (PARQUET,), 0.75),
    Target(BUS.name, RATE, (PARQUET,), 0.6),
    Target(SLOW.name, RATE, (TUPLES,), 2.5),
    Target(SINK.name, RATE, (PARQUET,), 0.6),
    Ceiling(LATENCY.name, P50, 250 * US_PER_MS),
)
