"""Who expects an answer.

Answers say nothing about which request they answer: they come in the order of
the requests, and are dealt to those who expect them. A caller that has given up
still has its place in the queue; its answers are taken and thrown away.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from polybus.dialects.freud.client.answer_batch import Answer, AnswerBatch
from polybus.dialects.freud.codec import Code
from polybus.errors import PolybusError


class AnswerReceiver(Protocol):
    """`take` gets the answers, in one or several pieces; `fail` says that none will come."""

    def on_request(self, batch: AnswerBatch, start: int, end: int) -> None: ...
    def fail(self, error: PolybusError) -> None: ...


class SingleAnswer:
    """Expects the answer to one request."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def on_request(self, batch: AnswerBatch, start: int, end: int) -> None:
        if not self.answered.done():
            self.answered.set_result(batch[start])

    def fail(self, error: PolybusError) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)
            self.answered.exception()  # who has given up need not be told that nobody looked


class ProduceAnswers:
    """Expects the answers to many Produces: ids, and None where nobody was there to read."""

    def __init__(self) -> None:
        self.ids: list[int | None] = []
        self.refused: Answer | None = None  # the first that was, if any
        self.error: PolybusError | None = None
        self._unanswered = 0
        self._progress = asyncio.Event()

    def expect(self, count: int) -> None:
        self._unanswered += count

    def on_request(self, batch: AnswerBatch, start: int, end: int) -> None:
        self._unanswered -= end - start
        self._progress.set()
        while start < end:
            after = batch.run_end(start, end)
            code = batch.code(start)
            if code == Code.OK:
                self.ids += batch.message_ids(start, after)
            elif code == Code.NOTHING_HAPPENED:
                self.ids += [None] * (after - start)
            elif self.refused is None:
                self.refused = batch[start]
            start = after

    def fail(self, error: PolybusError) -> None:
        self.error = error
        self._progress.set()

    async def wait_all(self, timeout_s: float) -> None:
        """Return when every answer is here; TimeoutError if none came for so long."""
        while self._unanswered and self.error is None:
            self._progress.clear()
            async with asyncio.timeout(timeout_s):
                await self._progress.wait()
        if self.error is not None and self.refused is None:  # a refusal says more
            raise self.error
