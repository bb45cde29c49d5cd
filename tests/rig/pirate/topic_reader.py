"""Reads topics over an honest line, from their first message on: what really is in them.

It is a subscriber as any other, so messages are collected behind it while a round goes on.
What it saw is the topic, because ids have no gaps: that is checked, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread

from tests.rig.pirate import wire
from tests.rig.pirate.random_client import told
from tests.rig.pirate.zmq_client import Bare

PAUSE_S = 0.02  # when there was nothing new


class Witness:
    """`seen` is complete once `finish` has returned."""

    def __init__(self, endpoint: str, topics: Sequence[str]) -> None:
        self.seen: dict[str, list[tuple[int, str]]] = {topic: [] for topic in topics}
        self.failure: BaseException | None = None
        self._bare = Bare(endpoint, b"witness", try_s=1.0)
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
        """However the round went; the bus must be there."""
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
                assert word == "MSG", f"the witness received {answer}"
                assert isinstance(identity, int)
                assert isinstance(body, bytes)
                seen.append((identity, told(body)))
