"""The cases, and their requirements.

- one call at a time with the client: at least 0.6 of a relay in C with the same four hops between
  the same ends
- 64 calls in flight on one connection of the client: at least 3 times raw pynng, Req0 and Rep0
  with no bus between; at least 1.5 times nats-py on nats-server, and 1.5 times grpcio's asyncio
- the same with pynng at both ends: at least as fast as raw pynng
- a stream of small items: at least 200 000 per second
- 1 GiB in items of 1 MiB: at least 0.5 of the relay in C
- 64 calls in flight over one TLS link: at least 0.5 of the same calls within one bus
- an idle link: at most 1 ms of CPU time per second
"""

from bench.harness.results import P50, P99, Ceiling, Floor, Metric, Requirement, Target
from bench.store.rounds import Case

CALLS = Metric("calls_per_s", "k calls/s", higher_is_better=True, scale=1e3)
ITEMS = Metric("items_per_s", "k items/s", higher_is_better=True, scale=1e3)
BYTES = Metric("bytes_per_s", "MB/s", higher_is_better=True, scale=1e6)

IDLE_CPU = Metric("idle_cpu_us", "µs CPU/s", higher_is_better=False)

RELAY, PYNNG, NATS, GRPC = "relay in C", "pynng Req0/Rep0", "nats-py", "grpcio asyncio"
ONE_BUS, TWO_LINKS, NO_LINK = "one bus", "two links", "no link"
IN_FLIGHT = 64

ONE = Case("gsb-one", "one call at a time", (CALLS, P50, P99))
MANY = Case("gsb-64", "64 calls at a time, one connection", (CALLS, P50, P99))
PYNNG_ENDS = Case("gsb-pynng", "64 calls at a time, pynng at both ends", (CALLS, P50, P99))
STREAM = Case("gsb-stream", "a stream of small items", (ITEMS,))
BULK = Case("gsb-bulk", "a stream of items of 1 MiB", (BYTES,))
LINK = Case("gsb-link", "64 calls at a time, over a TLS link", (CALLS, P50, P99))
IDLE = Case("gsb-idle-link", "a link without calls", (IDLE_CPU,))
CASES = (ONE, MANY, PYNNG_ENDS, STREAM, BULK, LINK, IDLE)

REQUIREMENTS: tuple[Requirement, ...] = (
    Target(ONE.name, CALLS, (RELAY,), 0.6),
    Target(MANY.name, CALLS, (PYNNG,), 3.0),
    Target(MANY.name, CALLS, (NATS,), 1.5),
    Target(MANY.name, CALLS, (GRPC,), 1.5),
    Target(PYNNG_ENDS.name, CALLS, (PYNNG,), 1.0),
    Floor(STREAM.name, ITEMS, 200e3),
    Target(BULK.name, BYTES, (RELAY,), 0.5),
    Target(LINK.name, CALLS, (ONE_BUS,), 0.5),
    Ceiling(IDLE.name, IDLE_CPU, 1000, NO_LINK, 1.0),
)
