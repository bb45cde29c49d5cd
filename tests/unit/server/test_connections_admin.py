"""The admin verb `connections`: pages, limits, and steps between which the loop runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polybus.bus.admin_verb import AdminError
from polybus.model.identity import ANONYMOUS
from polybus.server.connections_admin import DEFAULT_ROWS, MAX_ROWS, STEP_ROWS, connections_verb
from tests.rig.memory_bus import MemoryBus

COUNT = 3 * STEP_ROWS + 1


@pytest.fixture(scope="module")
def bus() -> MemoryBus:
    bus = MemoryBus()
    for _ in range(COUNT):
        bus.connect()
    return bus


async def ask(bus: MemoryBus, **request: Any) -> dict[str, Any]:
    verb = connections_verb(bus.broker.overview.connections)
    answer: dict[str, Any] = await verb.answer({"verb": "connections", **request}, ANONYMOUS)
    return answer


@pytest.mark.parametrize("limit", [1, STEP_ROWS, STEP_ROWS + 1, MAX_ROWS])
def test_pages_have_all_connections(bus: MemoryBus, limit: int):
    found: list[int] = []
    after: str | None = ""
    while after is not None:
        page = asyncio.run(ask(bus, after=after, limit=limit))
        assert len(page["connections"]) <= limit
        found += [row["id"] for row in page["connections"]]
        after = page["next"]
    assert found == list(range(1, COUNT + 1))


def test_first_page_without_a_limit(bus: MemoryBus):
    page = asyncio.run(ask(bus))
    assert len(page["connections"]) == DEFAULT_ROWS
    assert page["next"] == f"0.{DEFAULT_ROWS}"


def test_loop_runs_between_the_steps_of_a_page(bus: MemoryBus):
    async def scene() -> int:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count_turns())
        await ask(bus, limit=MAX_ROWS)
        counting.cancel()
        return turns

    assert asyncio.run(scene()) == COUNT // STEP_ROWS


@pytest.mark.parametrize(
    "request_keys",
    [
        {"limit": 0},
        {"limit": MAX_ROWS + 1},
        {"limit": True},
        {"limit": "5"},
        {"after": 7},
        {"after": "elsewhere"},
    ],
)
def test_bad_request(bus: MemoryBus, request_keys: dict[str, Any]):
    with pytest.raises(AdminError) as refused:
        asyncio.run(ask(bus, **request_keys))
    assert refused.value.code == "bad_request"
