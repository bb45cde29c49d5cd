"""Many Produces to one topic, sent without waiting for each answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from polybus.dialects.freud import codec
from polybus.dialects.freud.client.answer_batch import encode_run
from polybus.dialects.freud.client.answer_receiver import ProduceAnswers
from polybus.dialects.freud.client.freud_connection import FreudConnection
from polybus.errors import ConnectionLost, TooLarge
from polybus.model.limits import KIB

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Requests are encoded in buffers of about this size: few writes, and early ones.
RUN_BYTES = 256 * KIB
# How many bodies of an iterable are looked at together.
GROUP = 4096


class PipelinedProduce:
    """One call's way through a link; `answers` has what came back."""

    def __init__(
        self, link: FreudConnection, name: bytes, max_frame_bytes: int, timeout_s: float
    ) -> None:
        self.answers = ProduceAnswers()
        self._link = link
        self._name = name
        self._max_frame_bytes = max_frame_bytes
        self._timeout_s = timeout_s

    async def run(self, bodies: Iterable[Buffer]) -> None:
        """Send until the end, or until one is refused; then wait for all that was sent."""
        items = iter(bodies)
        try:
            while group := list(itertools.islice(items, GROUP)):
                if not await self._send(group):
                    break
            await self.answers.wait_all(self._timeout_s)
        except TimeoutError:
            raise self._link.timeout_error(self._timeout_s) from None
        except ConnectionLost:
            if self.answers.refused is None:  # else it hung up because of that
                raise

    async def _send(self, group: Sequence[Buffer]) -> bool:
        place = 0
        while place < len(group) and self.answers.refused is None:
            data, after = encode_run(self._name, group, place, self._max_frame_bytes, RUN_BYTES)
            if after == place:
                raise self._too_large(group[place])
            async with asyncio.timeout(self._timeout_s):
                await self._link.wait_room()
            self.answers.expect(after - place)
            self._link.send(data, after - place, self.answers)
            place = after
        return self.answers.refused is None

    def _too_large(self, body: Buffer) -> TooLarge:
        most = codec.max_body(self._name, self._max_frame_bytes)
        return TooLarge(f"a body of {memoryview(body).nbytes} bytes: at most {most} fit")
