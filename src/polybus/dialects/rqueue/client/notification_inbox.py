"""What a client has received and its user has not read yet.

Batches wait in the order they came. They can be read by the batch or message by
message, in any mixture: the rest of a batch that was begun is the next batch.
`held_bytes` is what waits; whoever fills the inbox keeps it within bounds by not
reading from the socket.

`next_message` takes only from the batch that was begun and touches nothing
else, so a blocking reader may call it from a thread of its own and bother the
event loop once per batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from polybus.dialects.rqueue.client.notification_batch import Message, NotificationBatch


class NotificationInbox:
    """See the top of the file. `on_taken` is called when there is room again."""

    def __init__(self, on_taken: Callable[[], None]) -> None:
        self.held_bytes = 0
        self._on_taken = on_taken
        self._batches: deque[NotificationBatch] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self._current: NotificationBatch | None = None
        self._rest: Iterator[Message] = iter(())
        self._read = 0

    def put(self, batch: NotificationBatch) -> None:
        self.held_bytes += batch.memory_bytes
        self._batches.append(batch)
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """Nothing more will come. Readers get what waits, then `error` or the end."""
        if not self._ended:
            self._ended, self._error = True, error
        self._changed.set()

    async def next_batch(self) -> NotificationBatch | None:
        """The next batch, waiting for it; None at the end."""
        rest = self._take_rest()
        return rest if rest is not None else await self._take()

    def next_message(self) -> Message | None:
        """The next message of the batch that was begun; None if `begin` is needed."""
        message = next(self._rest, None)
        self._read += 1
        return message

    async def start_batch(self) -> bool:
        """Begin the next batch, waiting for it; False at the end."""
        batch = await self._take()
        if batch is None:
            return False
        self._current, self._rest, self._read = batch, iter(batch), 0
        return True

    def _take_rest(self) -> NotificationBatch | None:
        begun, read = self._current, self._read
        self._current, self._rest = None, iter(())
        return begun[read:] if begun is not None and read < len(begun) else None

    async def _take(self) -> NotificationBatch | None:
        while not self._batches:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        batch = self._batches.popleft()
        self.held_bytes -= batch.memory_bytes
        self._on_taken()
        return batch
