"""`with envelope.transaction() as tx`: outputs and the ack of a message, atomically.

The bus commits both or neither, once. If the response was lost, the repeated call finds the
message acked and changes nothing. The commit of a run that was given up (`Stale`), or whose
shard belongs to another consumer (`Fenced`), is refused together with its outputs.

A commit is JSON, so it carries only small outputs. Larger ones are staged as Arrow, and the
commit names the stage. Staged rows become visible with the commit, or never.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from polybus.dialects.fdq.client.envelope import Headers, check_headers, check_key, check_message
from polybus.dialects.fdq.client.group_member import ConsumerClosing
from polybus.errors import ConnectionLost, Paused, Stale, Unavailable, UsageError
from polybus.model import topic_name
from polybus.native.client.produce_queue import build_batch

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.envelope import Envelope
    from polybus.dialects.fdq.client.group_member import GroupMember
    from polybus.dialects.fdq.client.handler_run import MessageRun
    from polybus.native import Client
    from polybus.native.protocol.answers import Committed

T = TypeVar("T")

MAX_INLINE_BYTES = 2 << 20  # of JSON; the bus accepts twice that
MAX_STAGED_BYTES = 16 << 20  # per batch


class TransactionOutput(NamedTuple):
    topic: str
    shard_key: str | None
    message: bytes
    headers: Headers | None
    insertion_ms: int

    @property
    def size_bytes(self) -> int:
        headers = sum(len(name) + len(value) for name, value in self.headers or ())
        return len(self.shard_key or "") + len(self.message) + headers


class Transaction:
    """The transaction of one run on one message, for one thread at a time.

    Leaving it with an exception commits nothing and fails the run. After the commit,
    `is_duplicate` is True if the message was acked before and no output was added.
    """

    def __init__(self, run: MessageRun, envelope: Envelope) -> None:
        self.envelope = envelope
        self.is_duplicate = False
        self._run = run
        self._outputs: list[TransactionOutput] = []
        self._is_open = False

    def produce(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        ttl_s: float | None = None,
    ) -> None:
        """Add an output. It is invisible until the transaction is committed.

        Groups do not get it `ttl_s` seconds after the commit.
        """
        if not self._is_open:
            raise UsageError("produce must be called inside the `with` block of the transaction")
        topic_name.check_topic_name(topic)
        check_key(shard_key)
        body, checked = check_message(message), check_headers(headers, ttl_s)
        now_ms = time.time_ns() // 1_000_000
        self._outputs.append(TransactionOutput(topic, shard_key, body, checked, now_ms))

    def __enter__(self) -> Self:
        if self._is_open or self._run.is_committed:
            raise UsageError("transaction is open or committed already; a message is acked once")
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        if kind is None:
            self._commit()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        if kind is None:
            await asyncio.to_thread(self._commit)

    def _commit(self) -> None:
        run = self._run
        assert run.shard.committer is not None
        outputs, self._outputs = self._outputs, []
        response = run.shard.committer.commit(run, outputs)
        self.is_duplicate = bool(response.get("duplicate"))
        run.is_committed = True


class TransactionCommitter:
    """Commits the transactions of one subscription."""

    def __init__(self, bus: Client, member: GroupMember) -> None:
        self._bus = bus
        self._member = member

    def commit(self, run: MessageRun, outputs: list[TransactionOutput]) -> Committed:
        """Commit outputs and ack.

        Raises `Stale` if the run has ended or was given up, `Fenced` if its shard belongs to
        another consumer.
        """
        if run.is_over:
            raise Stale(f"offset {run.offset}: the run has ended or timed out")
        is_small = sum(map(_inline_bytes, outputs)) <= MAX_INLINE_BYTES
        messages = [_to_json(output) for output in outputs] if is_small else []
        place = {"shard": run.shard.number, "shard_epoch": run.shard.epoch, "offset": run.offset}
        retry = self._member.retry
        # A pause of an output topic must not make dead letters. The handler decides about
        # `LimitReached`.
        retryable = (Unavailable, Paused)
        try:
            stages = [] if is_small else [retry(lambda: self._stage_outputs(outputs), retryable)]
            return retry(
                lambda: self._member.commit(
                    **place, attempt=run.attempts, messages=messages, stages=stages
                ),
                retryable,
            )
        except ConsumerClosing:
            raise ConnectionLost("the consumer was closed before the bus responded") from None

    def _stage_outputs(self, outputs: list[TransactionOutput]) -> str:
        """Stage all outputs, in order per topic. Returns the name of the stage."""
        chunks: list[tuple[str, list[TransactionOutput]]] = []
        sizes: dict[str, int] = {}
        open_chunks: dict[str, list[TransactionOutput]] = {}
        for output in outputs:
            topic, size = output.topic, output.size_bytes
            if topic not in open_chunks or sizes[topic] + size > MAX_STAGED_BYTES:
                open_chunks[topic], sizes[topic] = [], 0
                chunks.append((topic, open_chunks[topic]))
            open_chunks[topic].append(output)
            sizes[topic] += size
        with closing(self._bus.stage()) as stage:
            for topic, chunk in chunks:
                _, keys, bodies, headers, times = zip(*chunk, strict=True)
                rows = build_batch(keys, bodies, times, headers if any(headers) else None)
                stage.put_rows(topic, rows)
            name: str = stage.name
            return name


def _inline_bytes(output: TransactionOutput) -> int:
    """Return an upper bound of its JSON: texts escaped (12 bytes per character), base64."""
    texts, raw, fields = len(output.topic) + len(output.shard_key or ""), len(output.message), 128
    for name, value in output.headers or ():
        texts, raw, fields = texts + len(name), raw + len(value), fields + 16
    return fields + 12 * texts + (raw + 2) * 4 // 3


def _to_json(output: TransactionOutput) -> dict[str, Any]:
    headers = output.headers
    return {
        "topic": output.topic,
        "shard_key": output.shard_key,
        "body": _to_base64(output.message),
        "headers": None if headers is None else {name: _to_base64(raw) for name, raw in headers},
        "insertion_ms": output.insertion_ms,
    }


def _to_base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
