"""The installed dialects, found by the entry-point group `polybus.dialects`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from polybus.bus.dialect import Command, Dialect

if TYPE_CHECKING:
    from polybus.model.topic import Bounds, Topic
    from polybus.store.contract import Store

GROUP = "polybus.dialects"


class DialectRegistry:
    """Dialects by name, in the order of their names.

    `skipped` has one line for each entry point that could not be used.
    """

    def __init__(self, dialects: Mapping[str, Dialect], skipped: tuple[str, ...] = ()) -> None:
        self._dialects = dict(sorted(dialects.items()))
        self.skipped = skipped

    def __iter__(self) -> Iterator[Dialect]:
        return iter(self._dialects.values())

    def __contains__(self, name: str) -> bool:
        return name in self._dialects

    def __getitem__(self, name: str) -> Dialect:
        return self._dialects[name]

    @property
    def listening(self) -> list[Dialect]:
        """Return the dialects that have a server side."""
        return [one for one in self if one.open_server is not None]

    @property
    def listener_names(self) -> list[str]:
        """Return the names of listeners: the dialects, each followed by its other framings."""
        return [
            name
            for one in self.listening
            for name in (one.name, *(f"{one.name}+{framing}" for framing in one.framings))
        ]

    @property
    def commands(self) -> list[Command]:
        return [command for dialect in self for command in dialect.commands]

    @property
    def reserved_topics(self) -> dict[str, str]:
        """Return the topics that only the bus writes, with their purposes."""
        return {
            topic: purpose for dialect in self for topic, purpose in dialect.reserved_topics.items()
        }

    def read_subscribers(
        self, store: Store, topic: Topic, bounds: Bounds
    ) -> list[Mapping[str, Any]]:
        """Return the stored subscribers of a topic, of all dialects."""
        return [
            subscriber
            for dialect in self
            if dialect.read_subscribers is not None
            for subscriber in dialect.read_subscribers(store, topic, bounds)
        ]

    def producer_owner(self, producer: str) -> tuple[str, str] | None:
        """Return (prefix, owner) if the name is reserved for a dialect."""
        for dialect in self:
            for prefix, owner in dialect.reserved_producers.items():
                if producer.startswith(prefix):
                    return prefix, owner
        return None


@cache
def installed_dialects() -> DialectRegistry:
    """Return the registry of this environment. It is read once per process.

    An entry point whose module is gone, or that names something else than a `Dialect`, is
    skipped: one broken distribution must not stop the bus.
    """
    from importlib.metadata import entry_points  # here: it costs more than all other imports

    dialects: dict[str, Dialect] = {}
    skipped: list[str] = []
    for entry in entry_points(group=GROUP):
        if entry.name in dialects:  # the same distribution, found twice on the path
            continue
        try:
            dialect = entry.load()
        except Exception as error:
            skipped.append(f"dialect {entry.name!r} ({entry.value}) cannot be loaded: {error}")
            continue
        if isinstance(dialect, Dialect) and dialect.name == entry.name:
            dialects[entry.name] = dialect
        else:
            skipped.append(f"dialect {entry.name!r} ({entry.value}) is not a Dialect of this name")
    return DialectRegistry(dialects, tuple(skipped))
