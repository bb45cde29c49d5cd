"""Reads topics over a reliable connection, from their first message.

It is a subscriber, so the bus removes messages only after it has read them. Its messages are
the whole topic because ids have no gaps, which the verdict checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread

from tests.rig.pirate import wire
from tests.rig.pirate.random_client import describe_body
from tests.rig.pirate.zmq_client import Bare

PAUSE_S = 0.02  # when there was nothing new


class TopicReader:
    """`seen` is complete once `finish` has returned."""

    def __init__(self, endpoint: str, topics: Sequence[str]) -> None:
        self.seen: dict[str, list[tuple[int, str]]] = {topic: [] for topic in topics}
        self.failure: BaseException | None = None
        self._bare = Bare(endpoint, b"topic-reader", try_s=1.0)
        self._bare.hello()
        for topic in topics:
            assert self._bare.sub(topic)[0] == "OK"
        self._ending = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Read to the end after the last PUT."""
        self.close()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Stop the reader. The bus must be running."""
        self._ending.set()
        self._thread.join()
        self._bare.close()

    def _run(self) -> None:
        try:
            while not self._ending.wait(PAUSE_S):
                self._read()
            self._read()
        except BaseException as error:
            self.failure = error

    def _read(self) -> None:
        for topic, seen in self.seen.items():
            while (answer := self._bare.get(topic)) != wire.NONE:
                word, identity, body = answer
                assert word == "MSG", f"the topic reader received {answer}"
                assert isinstance(identity, int)
                assert isinstance(body, bytes)
                seen.append((identity, describe_body(body)))
