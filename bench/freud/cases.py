"""What is measured, and what must hold.

- one at a time from one client, at least 0.35 of the raw echo's round trips a second
- and ahead of method calls of both D-Bus buses, in round trips a second, at p50 and at p99: calls
  of a service in a process of its own, as programs make them. ROUND_TRIP shows besides what is left
  of a call when no process must be woken to serve it; no program can call so, and it has no target
  beside the buses (contract.py tells the difference)
- pipelined, at least a million messages a second: all produced and then all read, counting the
  time for both, and both at once
"""

from bench.freud.contract import BURST, FLOW, METHOD_CALL, REQUEST, ROUND_TRIP, SIZE
from bench.freud.rounds import Case
from bench.harness.results import P50, P99, RATE, Floor, Metric, Requirement, Target, Values
from bench.peers.dbus_broker import BROKER
from bench.peers.dbus_daemon import DAEMON
from bench.peers.echo import ECHO

TRIPS = Metric("round_trips_per_s", "k round trips/s", higher_is_better=True, scale=1e3)
PRODUCED = Metric("produced_per_s", "M produced/s", higher_is_better=True, scale=1e6)
DRAINED = Metric("drained_per_s", "M read/s", higher_is_better=True, scale=1e6)

NEAR_ONE_ROUNDS = 7  # of the cases whose target is near 1, where chance would decide with fewer
OF_ECHO = 0.35
LEAST_PER_S = 1e6


def _one_at_a_time(outcome: dict[str, float]) -> Values:
    trips = outcome["counted"] / outcome["seconds"]
    return {TRIPS.key: trips, P50.key: outcome[P50.key], P99.key: outcome[P99.key]}


def _pipelined(outcome: dict[str, float]) -> Values:
    seconds = {RATE: "seconds", PRODUCED: "produce_s", DRAINED: "drain_s"}
    return {metric.key: outcome["counted"] / outcome[key] for metric, key in seconds.items()}


ONE_AT_A_TIME = (TRIPS, P50, P99)
CASES = (
    Case(
        ROUND_TRIP,
        f"one at a time, {SIZE} B",
        ONE_AT_A_TIME,
        _one_at_a_time,
        NEAR_ONE_ROUNDS,
    ),
    Case(
        METHOD_CALL,
        f"one at a time, {SIZE} B, D-Bus service in its own process",
        ONE_AT_A_TIME,
        _one_at_a_time,
        NEAR_ONE_ROUNDS,
    ),
    Case(
        REQUEST,
        f"request and reply between two processes, {SIZE} B",
        ONE_AT_A_TIME,
        _one_at_a_time,
    ),
    Case(
        BURST,
        f"pipelined, all produced, then all read, {SIZE} B",
        (RATE, PRODUCED, DRAINED),
        _pipelined,
    ),
    Case(FLOW, f"pipelined, produced and read at once, {SIZE} B", (RATE,), _pipelined),
)

REQUIREMENTS: tuple[Requirement, ...] = (
    Target(ROUND_TRIP, TRIPS, (ECHO,), OF_ECHO),
    *(
        Target(METHOD_CALL, metric, (bus,), 1.0)
        for bus in (DAEMON, BROKER)
        for metric in ONE_AT_A_TIME
    ),
    Floor(BURST, RATE, LEAST_PER_S),
    Floor(FLOW, RATE, LEAST_PER_S),
)
