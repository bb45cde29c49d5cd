"""The open connections, page by page, while connections open and close."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.bus.connection_list import ConnectionList
from polybus.errors import UsageError
from tests.rig.call_count import count_calls
from tests.rig.memory_bus import MemoryBus


class Source:
    def __init__(self, name: str) -> None:
        self.name = name
        self.opened = 0
        self.open: list[int] = []

    @property
    def count(self) -> int:
        return len(self.open)

    def page(self, after: int, limit: int) -> list[tuple[int, dict[str, Any]]]:
        found = [number for number in self.open if number > after][:limit]
        return [(number, {"id": (self.name, number)}) for number in found]

    def begin(self) -> None:
        self.opened += 1
        self.open.append(self.opened)


def ids(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["id"] for row in rows]


def test_pages_go_on_with_the_next_source():
    both = [Source("a"), Source("b")]
    connections = ConnectionList()
    for source in both:
        connections.add_source(source)
        for _ in range(3):
            source.begin()
    assert connections.count == 6
    first, after = connections.page("", 2)
    second, after = connections.page(after or "", 2)
    third, after = connections.page(after or "", 2)
    last, end = connections.page(after or "", 2)
    assert ids(first + second + third) == [(name, n) for name in "ab" for n in (1, 2, 3)]
    assert (last, end) == ([], None)
    assert connections.page("", 7)[1] is None


@pytest.mark.parametrize("after", ["x", "1", "1.", ".1", "-1.0", "1.2.3", "١.٢", "0." + "9" * 50])
def test_unknown_cursor_is_refused(after: str):
    with pytest.raises(UsageError, match="after must be the 'next' of an earlier page"):
        ConnectionList().page(after, 1)


CHANGES = st.lists(st.tuples(st.sampled_from(("open", "close")), st.integers(0, 1)), max_size=4)


@given(st.integers(0, 8), st.integers(0, 8), st.integers(1, 4), st.lists(CHANGES, max_size=20))
def test_connection_that_stays_open_is_listed_once(first: int, second: int, limit: int, changes):
    sources = [Source("a"), Source("b")]
    connections = ConnectionList()
    for source, count in zip(sources, (first, second), strict=True):
        connections.add_source(source)
        for _ in range(count):
            source.begin()
    staying = {(source.name, number) for source in sources for number in source.open}
    listed: list[Any] = []
    after: str | None = ""
    pending = list(changes)
    while after is not None:
        rows, after = connections.page(after, limit)
        assert len(rows) <= limit
        listed += ids(rows)
        for change, which in pending.pop() if pending else ():
            source = sources[which]
            if change == "open":
                source.begin()
            elif source.open:
                staying.discard((source.name, source.open.pop(len(source.open) // 2)))
    assert len(listed) == len(set(listed))
    assert staying <= set(listed)


def test_cost_of_a_page_does_not_grow_with_the_connections():
    def calls_of_a_page(count: int) -> int:
        bus = MemoryBus()
        for _ in range(count):
            bus.connect()
        page = bus.broker.overview.connections.page
        return count_calls(lambda: page("0.10", 5))

    assert calls_of_a_page(300) == calls_of_a_page(20)
