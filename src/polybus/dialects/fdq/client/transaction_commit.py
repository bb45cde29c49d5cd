"""How a transaction's outputs travel: with its commit, or before it, as a stage.

A commit is JSON, so it carries small outputs only. Large ones are staged, as Arrow, and
the commit names the stage: what was staged becomes visible with it, or never.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from polybus.dialects.fdq.client.group_member import ConsumerClosing
from polybus.dialects.fdq.client.message_columns import build_batch
from polybus.errors import ConnectionLost, Stale, Unavailable

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.group_member import GroupMember
    from polybus.dialects.fdq.client.handler_run import MessageRun
    from polybus.dialects.fdq.client.transaction import TransactionOutput
    from polybus.native.bus_client import BusClient

T = TypeVar("T")

MAX_INLINE_BYTES = 2 << 20  # of JSON, of which the bus reads twice that
MAX_STAGED_BYTES = 16 << 20  # in one batch


class TransactionCommitter:
    """Transactions of one consumer."""

    def __init__(self, bus: BusClient, member: GroupMember) -> None:
        self._bus = bus
        self._member = member

    def commit(self, run: MessageRun, outputs: list[TransactionOutput]) -> dict[str, Any]:
        """`Stale`: the run is over, or was given up; `Fenced`: its shard is another's now."""
        if run.is_over:
            raise Stale(f"offset {run.offset}: this run has ended, or took too long")
        is_small = sum(map(_inline_bytes, outputs)) <= MAX_INLINE_BYTES
        carried = [_message(one) for one in outputs] if is_small else []
        place = {"shard": run.shard.number, "shard_epoch": run.shard.epoch, "offset": run.offset}
        try:
            stages = [] if is_small else [self._retry(lambda: self._stage_outputs(outputs))]
            return self._retry(
                lambda: self._member.commit(
                    **place, attempt=run.attempts, messages=carried, stages=stages
                )
            )
        except ConsumerClosing:
            raise ConnectionLost("the consumer was closed before the bus has answered") from None

    def _retry(self, step: Callable[[], T]) -> T:
        """Limits are the handler's business: here only a bus that is away is waited for."""
        return self._member.retry(step, (Unavailable,))

    def _stage_outputs(self, outputs: list[TransactionOutput]) -> str:
        """The name of a stage that has all of them, in order per topic."""
        with closing(self._bus.stage()) as stage:
            for topic, some in _chunks(outputs):
                stage.put_rows(topic, _batch(some))
            name: str = stage.name
            return name


def _chunks(outputs: list[TransactionOutput]) -> list[tuple[str, list[TransactionOutput]]]:
    found: list[tuple[str, list[TransactionOutput]]] = []
    sizes: dict[str, int] = {}
    open_chunks: dict[str, list[TransactionOutput]] = {}
    for one in outputs:
        if one.topic not in open_chunks or sizes[one.topic] + one.size_bytes > MAX_STAGED_BYTES:
            open_chunks[one.topic], sizes[one.topic] = [], 0
            found.append((one.topic, open_chunks[one.topic]))
        open_chunks[one.topic].append(one)
        sizes[one.topic] += one.size_bytes
    return found


def _batch(outputs: list[TransactionOutput]) -> Any:
    _, keys, bodies, headers, times = zip(*outputs, strict=True)
    return build_batch(keys, bodies, times, headers if any(headers) else None)


def _inline_bytes(output: TransactionOutput) -> int:
    """What it is at most in JSON: texts escaped (twelve bytes a character), bytes as base64."""
    texts, raw, fields = len(output.topic) + len(output.shard_key or ""), len(output.message), 128
    for name, value in output.headers or ():
        texts, raw, fields = texts + len(name), raw + len(value), fields + 16
    return fields + 12 * texts + (raw + 2) * 4 // 3


def _message(output: TransactionOutput) -> dict[str, Any]:
    headers = output.headers
    return {
        "topic": output.topic,
        "shard_key": output.shard_key,
        "body": base64.b64encode(output.message).decode(),
        "headers": None if headers is None else {name: _text(value) for name, value in headers},
        "insertion_ms": output.insertion_ms,
    }


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
