"""Publication of staged rows by the driver: one publish makes an epoch visible, all or nothing.

The epoch of a stream has a stamp: the producer is `producerId` or the query's id, the counter is
Spark's batch id + 1. If the driver dies after the publish and before it writes Spark's commit log,
Spark runs the epoch again. It has the same stamp, so the second publish changes nothing.

A batch write uses `transactionId` as its stamp if it is given, and repeating it publishes nothing.
Without it the write opens a producer for the duration of the publish, so that the request can be
repeated if its response is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polybus.errors import PolybusError, StageGone, Stale, TooLarge, UsageError
from polybus.spark.sink.task_stage import StagedRows

if TYPE_CHECKING:
    from polybus.native import Client

# A commit changes at most 900 records of the store; each stage is one.
MAX_STAGES = 890
TRANSACTION = "transaction/"


def publish_epoch(
    client: Client, parts: Sequence[StagedRows], batch_id: int, producer: str | None, on_new: str
) -> None:
    """Publish an epoch of a stream. An epoch without rows is skipped: counters may have gaps."""
    stages = stages_of(parts)
    queries = {part.query for part in parts if part.query}
    if not stages:
        return
    if len(queries) != 1:
        raise UsageError(f"tasks of one epoch belong to {len(queries)} queries; use writeStream")
    (query,) = queries
    # Counters start at 1, batch ids at 0.
    stamp = {"producer": producer or query, "counter": batch_id + 1}
    _publish(client, stages, stamp=stamp, run={"id": query, "on_new": on_new})


def publish_batch(
    client: Client, parts: Sequence[StagedRows], transaction: str | None, number: int = 1
) -> None:
    """Publish a batch write, once per `transaction` and `number`; always if `transaction` is None.

    The numbers of a transaction name must rise.
    """
    stages = stages_of(parts)
    if transaction is not None:
        stamp: dict[str, Any] = {"producer": TRANSACTION + transaction, "counter": number}
        _publish(client, stages, stamp=stamp, run={"id": transaction})
    elif stages:
        opened = client.act("producer.open")
        stamp = {"producer": opened["producer"], "epoch": opened["epoch"], "counter": 1}
        _publish(client, stages, stamp=stamp)
        client.act("producer.close", producer=opened["producer"], epoch=opened["epoch"])


def discard(client: Client, parts: Sequence[StagedRows | None]) -> None:
    """Discard the stages of a failed job. If the bus does not answer, their leases expire."""
    for part in parts:
        if part is not None and part.stage is not None:
            try:
                client.act("stage.discard", stage=part.stage)
            except PolybusError:
                return


def stages_of(parts: Sequence[StagedRows]) -> list[str]:
    """Return the names of the stages; raises `TooLarge` if one commit cannot publish them."""
    stages = [part.stage for part in parts if part.stage is not None]
    if len(stages) > MAX_STAGES:
        raise TooLarge(
            f"write with at most {MAX_STAGES} tasks, got {len(stages)}: all are published in one "
            f"commit; use .coalesce({MAX_STAGES}) before .write"
        )
    return stages


def _publish(client: Client, stages: list[str], **stamped: Any) -> None:
    try:
        client.act("stage.publish", stages=stages, **stamped)
    except StageGone as error:
        raise StageGone(
            f"nothing was published: a stage has expired ({error}); write it again; "
            "stages are kept for a day after their task has ended"
        ) from None
    except Stale:
        raise Stale(
            "use a new checkpointLocation: this one was set back to an epoch that is too old to "
            "check whether its rows were published"
        ) from None
