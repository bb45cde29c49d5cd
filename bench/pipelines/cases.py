"""The cases and their targets: ratios of rows per second in one run, `local[2]`, warm.

- `route` that catches up, orders of a certain size by a field of their JSON: at least 0.7 of the
  same query as a stream from Parquet files to Parquet files
- without a target, `route` that copies everything
- `archive` of a topic: at least 0.8 of Spark's own copy from Parquet to Parquet, zstd like the
  archive, both as a batch and as a stream
- a full scan, `sum(length(body))`, of archive and log as one table, 95 % archived: at least 0.8 of
  the same rows in Parquet alone; without a target, the same by the format's option
"""

from bench.harness.results import RATE, Requirement, Target
from bench.store.rounds import Case

MESSAGES = 2_000_000  # also in the short form: a query that catches up has a long backlog
PARQUET = "Parquet"

ROUTE = Case("route", "route: catching up, orders by a field of their JSON", (RATE,))
COPY = Case("route-copy", "route: catching up, all of it", (RATE,))
ARCHIVE = Case("archive", "archive: a topic → Parquet, 128 B", (RATE,))
UNION = Case("union", "union: full scan of archive and log, 95 % archived", (RATE,))
CASES = (ROUTE, COPY, ARCHIVE, UNION)
BATCH = "Parquet, a batch"
BY_FORMAT = "polybus, format() alone"

LARGE = "get_json_object(cast(body AS string), '$.cents') >= 500000"
WHERE: dict[str, str | None] = {ROUTE.name: LARGE, COPY.name: None}
SELECT = "body, shard_key"

REQUIREMENTS: tuple[Requirement, ...] = (
    Target(ROUTE.name, RATE, (PARQUET,), 0.7),
    Target(ARCHIVE.name, RATE, (BATCH, PARQUET), 0.8),
    Target(UNION.name, RATE, (PARQUET,), 0.8),
)
