"""Actions on stages: batches that nobody sees until all of them are published at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.errors import MalformedRequest
from polybus.model.commit import Commit, CommitResult
from polybus.model.stamp import Stamp
from polybus.native.port import query_runs
from polybus.native.protocol.fields import ActionSchema, Answer, Arguments, Field
from polybus.store.contract import LEASE_S

if TYPE_CHECKING:
    from polybus.native.port.native_port import Caller, NativePort

MAX_LEASE_S = 7 * 86_400.0
STAGE = Field("stage", "text", "what stage.new answered")
LEASE = Field("lease_s", "seconds", "how long it is kept unless renewed", LEASE_S)


def _lease(given: Arguments) -> float:
    lease_s = float(given["lease_s"])
    if lease_s > MAX_LEASE_S:
        raise MalformedRequest(f"lease_s is at most {MAX_LEASE_S:.0f}")
    return lease_s


def _new(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    return {"stage": port.store.open_stage(_lease(given))}


def _renew(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    port.store.renew(given["stage"], _lease(given))
    return {}


def _publish(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    done = (
        _publish_run(port, caller, given) if given["run"] else _publish_stages(port, caller, given)
    )
    names = {one.topic: port.access.durable.find_by_number(one.topic) for one in done.spans}
    topics = {number: topic.name if topic else None for number, topic in names.items()}
    spans = [
        {
            "topic": topics[one.topic],
            "shard": one.shard,
            "first_offset": one.first_offset,
            "first_id": one.first_id,
            "count": one.count,
        }
        for one in done.spans
    ]
    return {"spans": spans, "timestamp_ns": done.timestamp_ns, "duplicate": done.duplicate}


def _publish_stages(port: NativePort, caller: Caller, given: Arguments) -> CommitResult:
    stamp = Stamp.parse(given["stamp"]) if given["stamp"] else None
    if stamp is not None:
        port.owners.check(caller.identity, stamp.producer)
    return port.access.durable.commit(Commit(stages=tuple(given["stages"]), stamp=stamp)).result()


def _publish_run(port: NativePort, caller: Caller, given: Arguments) -> CommitResult:
    asked = query_runs.RunCommit.parse(given["stages"], given["stamp"], given["run"])
    done = query_runs.publish(port.access.durable, port.owners, caller.identity, asked)
    if done.duplicate:
        for stage in asked.stages:  # a replay's: nobody will publish them
            port.store.discard(stage)
    return done


def _discard(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    port.store.discard(given["stage"])
    return {}


ACTIONS = {
    ActionSchema(
        "stage.new", "A new, empty stage; whoever knows its name may use it", (LEASE,), "stage"
    ): _new,
    ActionSchema("stage.renew", "Its lease runs from now on", (STAGE, LEASE), "nothing"): _renew,
    ActionSchema(
        "stage.publish",
        "Makes all that is staged visible, over all its topics, at once",
        (
            Field("stages", "texts", "in this order"),
            Field("stamp", "object", "producer, epoch, counter; a repeat publishes nothing", None),
            Field("run", "object", "id, on_new (refuse, continue); the stamp has no epoch", None),
        ),
        "spans: topic, shard, first_offset, first_id, count each; timestamp_ns, duplicate",
    ): _publish,
    ActionSchema(
        "stage.discard", "Removes a stage, if it is still there", (STAGE,), "nothing"
    ): _discard,
}
