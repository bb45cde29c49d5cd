"""The commands and the program of the retention guide run, and its table has all limits."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from polybus.durable.retention_limits import SETTINGS
from polybus.errors import AlreadyExists
from tests.rig.native_bus import NativeBus

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "retention.md").read_text()


@pytest.fixture(scope="module")
def bus() -> Iterator[NativeBus]:
    with NativeBus() as running:
        yield running


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def test_commands_run(polybus, bus):
    for line in "".join(blocks("sh")).splitlines():
        polybus(*shlex.split(line)[1:])
        if line.startswith("polybus topic create"):
            with bus.client() as client:
                client.act("group.join", topic="orders", group="billing", consumer="c")


def test_program_runs(bus):
    with bus.client() as client, suppress(AlreadyExists):
        client.create_topic("orders")
    (program,) = blocks("python")
    exec(program, {"url": bus.url})


def test_table_has_every_setting():
    assert set(re.findall(r"\| `(retain_\w+)` \|", GUIDE)) == SETTINGS
