"""What the driver does: one publish makes an epoch visible, all of it or nothing.

A stream's epoch carries a stamp: producer = `producerId`, else the query's id; counter =
Spark's batch id + 1. An epoch that Spark replays, because the driver died between our
publish and its own commit log, has the same stamp, and publishes nothing.

A batch write carries `transactionId` as its stamp, if it has one: done again, it publishes
nothing. Without, it is stamped for the length of the publish, so that an answer that was
lost on its way can be asked for again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polybus.errors import PolybusError, StageGone, Stale, TooLarge, UsageError
from polybus.spark.sink.task_stage import StagedRows

if TYPE_CHECKING:
    from polybus.native import Client

# A commit touches at most 900 places in the store; each stage is one.
MAX_STAGES = 890
TRANSACTION = "transaction/"


def publish_epoch(
    client: Client, staged: Sequence[StagedRows], batch_id: int, producer: str | None, on_new: str
) -> None:
    """An epoch without rows needs no publish, nor a stamp: counters may leave gaps."""
    stages = stages_of(staged)
    queries = {one.query for one in staged if one.query}
    if not stages:
        return
    if len(queries) != 1:
        raise UsageError(f"tasks of one epoch name {len(queries)} queries: write with writeStream")
    (query,) = queries
    stamp = {"producer": producer or query, "counter": batch_id + 1}
    _publish(client, stages, stamp=stamp, run={"id": query, "on_new": on_new})


def publish_batch(
    client: Client, staged: Sequence[StagedRows], transaction: str | None, number: int = 1
) -> None:
    """`transaction` names what is to be done once; None: this is done once more each time.

    Transactions of one name are a series: each number is done once, and they rise.
    """
    stages = stages_of(staged)
    if transaction is not None:
        stamp: dict[str, Any] = {"producer": TRANSACTION + transaction, "counter": number}
        _publish(client, stages, stamp=stamp, run={"id": transaction})
    elif stages:
        opened = client.act("producer.open")
        stamp = {"producer": opened["producer"], "epoch": opened["epoch"], "counter": 1}
        _publish(client, stages, stamp=stamp)
        client.act("producer.close", producer=opened["producer"], epoch=opened["epoch"])


def discard(client: Client, staged: Sequence[StagedRows | None]) -> None:
    """What the tasks of a failed job have staged. A bus that is not there collects it by itself."""
    for one in staged:
        if one is not None and one.stage is not None:
            try:
                client.act("stage.discard", stage=one.stage)
            except PolybusError:
                return


def stages_of(staged: Sequence[StagedRows]) -> list[str]:
    stages = [one.stage for one in staged if one.stage is not None]
    if len(stages) > MAX_STAGES:
        raise TooLarge(
            f"write with at most {MAX_STAGES} tasks: {len(stages)} wrote rows, and all are "
            f"published at once; .coalesce({MAX_STAGES}) before .write"
        )
    return stages


def _publish(client: Client, stages: list[str], **stamped: Any) -> None:
    try:
        client.act("stage.publish", stages=stages, **stamped)
    except StageGone as error:
        raise StageGone(
            f"write it again: nothing of it was published, since a part of it is gone ({error}); "
            "stages are kept for a day after their task has ended"
        ) from None
    except Stale:
        raise Stale(
            "use a fresh checkpointLocation: this one was set back to an epoch that was published "
            "long before the last one, so whether its rows are there cannot be told"
        ) from None
