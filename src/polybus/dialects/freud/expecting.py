"""What was asked and not answered yet.

Answers say nothing about which request they answer: they come in the order of
the requests, and are dealt to those who expect them. A caller that has given up
still has its place in the queue; its answers are taken and thrown away.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from polybus.dialects.freud.codec import Code
from polybus.errors import PolybusError
from polybus.kernel.freud_client import Answer, AnswerBatch


class Expecting(Protocol):
    """Expects `left` more answers. `take` gets them, in one or several pieces."""

    left: int

    def take(self, batch: AnswerBatch, start: int, end: int) -> None: ...
    def fail(self, error: PolybusError) -> None: ...


class OneAnswer:
    """Expects the answer to one request."""

    def __init__(self) -> None:
        self.left = 1
        self.answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def take(self, batch: AnswerBatch, start: int, end: int) -> None:
        if not self.answered.done():
            self.answered.set_result(batch[start])

    def fail(self, error: PolybusError) -> None:
        _fail(self.answered, error)


class MessageIds:
    """Expects the answers to many Produces: ids, None where nobody was there to read."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.ids: list[int | None] = []
        self.refused: Answer | None = None  # the first that was, if any
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, batch: AnswerBatch, start: int, end: int) -> None:
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
        if not self.left and not self.answered.done():
            self.answered.set_result(None)

    def fail(self, error: PolybusError) -> None:
        _fail(self.answered, error)


def _fail(answered: asyncio.Future[Answer] | asyncio.Future[None], error: PolybusError) -> None:
    if not answered.done():
        answered.set_exception(error)
        answered.exception()  # whoever has given up need not be told that it was not looked at
