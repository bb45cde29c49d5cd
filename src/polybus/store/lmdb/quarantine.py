"""Damaged topics of an open store, which it refuses to read and to write.

A bus must start although the records of one topic are damaged. Such a topic is in quarantine:
every read and write of it raises `Damaged`, background tasks leave it alone, and its name
cannot be given to another topic. The owner fills the quarantine when it opens the store
(`topic_inspection`).
"""

from __future__ import annotations

from polybus.errors import Damaged
from polybus.store.contract import DamagedTopic


class Quarantine:
    """The damaged topics of an open store. It is empty until the owner has inspected them."""

    def __init__(self) -> None:
        self.topics: list[DamagedTopic] = []
        self._by_number: dict[int, DamagedTopic] = {}
        self._by_name: dict[str, DamagedTopic] = {}

    def fill(self, found: list[DamagedTopic]) -> None:
        self.topics = found
        self._by_number.update((one.topic.number, one) for one in found)
        self._by_name.update((one.topic.name, one) for one in found)

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def check(self, number: int) -> None:
        """Raise `Damaged` if the topic of this number is in quarantine."""
        if number in self._by_number:
            raise Damaged(self._by_number[number].reason)

    def check_name(self, raw: bytes) -> None:
        """Raise `Damaged` if the topic of this name is in quarantine."""
        if self._by_name and (found := self._by_name.get(raw.decode("utf-8", "replace"))):
            raise Damaged(found.reason)
