"""`with envelope.transaction() as tx`: what is produced and the ack are one atomic step.

The bus commits both or none, once: if the answer was lost, the repeat finds the message
acked and changes nothing. A run that was given up, or whose shard is another's by now,
is refused (`Stale`, `Fenced`), and with it all that it produced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from polybus.dialects.fdq.client.message_columns import (
    Headers,
    check_headers,
    check_key,
    check_message,
)
from polybus.errors import UsageError
from polybus.model import topic_name

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.envelope import Envelope
    from polybus.dialects.fdq.client.handler_run import MessageRun


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
    """Of one run of the handler on one message, and of one thread at a time.

    Leaving it with an exception commits nothing, and the run has failed. Afterwards
    `is_duplicate` tells that the message was acked already and nothing was added.
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
    ) -> None:
        """Nobody sees it before the transaction is committed."""
        if not self._is_open:
            raise UsageError("produce inside of the transaction's `with`")
        topic_name.check_topic_name(topic)
        check_key(shard_key)
        body, notes = check_message(message), check_headers(headers)
        now_ms = time.time_ns() // 1_000_000
        self._outputs.append(TransactionOutput(topic, shard_key, body, notes, now_ms))

    def __enter__(self) -> Self:
        if self._is_open or self._run.is_committed:
            raise UsageError("a message is acked once: its transaction was committed")
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
        if kind is None:
            self._commit()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
        if kind is None:
            await asyncio.to_thread(self._commit)

    def _commit(self) -> None:
        run = self._run
        committer = run.shard.committer
        assert committer is not None
        outputs, self._outputs = self._outputs, []
        answer = committer.commit(run, outputs)
        self.is_duplicate = bool(answer.get("duplicate"))
        run.is_committed = True
