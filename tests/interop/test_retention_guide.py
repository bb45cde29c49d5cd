"""The commands and the program of the retention guide run, and its table has all limits."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress

import pytest

from polybus.durable.retention_limits import SETTINGS
from polybus.errors import AlreadyExists
from tests.rig.guide_page import GuidePage
from tests.rig.native_bus import NativeBus

PAGE = GuidePage("retention.md")


@pytest.fixture(scope="module")
def bus() -> Iterator[NativeBus]:
    with NativeBus() as running:
        yield running


def test_commands_run(polybus, bus):
    for line in "".join(PAGE.snippets("sh")).splitlines():
        polybus(*shlex.split(line)[1:])
        if line.startswith("polybus topic create"):
            with bus.client() as client:
                client.act("group.join", topic="orders", group="billing", consumer="c")


def test_program_runs(bus):
    with bus.client() as client, suppress(AlreadyExists):
        client.create_topic("orders")
    (program,) = PAGE.snippets("python")
    exec(program, {"url": bus.url})


def test_table_has_every_setting():
    assert set(re.findall(r"\| `(retain_\w+)` \|", PAGE.text)) == SETTINGS
