"""Bit flips on disk: reads are right or name the damage, and maintenance always returns."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rig.fork_server import ChildResult, ChildServer

ACTS = "tests.rig.store.bit_flips"
COMMITS = 25
ROUNDS = 40
PAGE_ROUNDS = 8
SOAK_ROUNDS = 5000
SOAK_PAGE_ROUNDS = 500


@pytest.fixture
def server() -> Iterator[ChildServer]:
    with ChildServer(ACTS) as server:
        yield server


@pytest.fixture
def filled(server: ChildServer, tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    server.ask("fill", str(folder), COMMITS)
    return folder


def flip_blocks(server: ChildServer, folder: Path, rounds: int) -> None:
    seed = random.randrange(1 << 32)
    found = server.ask("flip_blocks", str(folder), seed, rounds)
    assert not found["faults"], f"seed {seed}: {found['faults'][:10]}"
    assert found["damaged"] > rounds / 4, "hardly any flip hit something that is read"
    assert found["right"] > found["damaged"], "next to nothing was left to be read"


@pytest.mark.sabotage("checksum-off", expects="a wrong message")
def test_flipped_bit_in_a_block_is_reported_with_its_offset(server, filled):
    flip_blocks(server, filled, ROUNDS)


def flip_pages(server: ChildServer, source: Path, tmp_path: Path, rounds: int) -> int:
    """Return how many flips did harm. They may kill a direct reader, but not maintenance."""
    first, harmful = random.randrange(1 << 32), 0
    for seed in range(first, first + rounds):
        folder, rescued = tmp_path / f"flipped{seed}", tmp_path / f"rescued{seed}"
        server.ask("flip_pages", str(source), str(folder), seed)
        direct = server.run("compare", str(source), str(folder))
        harmed = bool(direct.signal or direct.failure or direct.answer["harmed"])
        found = answer(server.run("verify", str(folder)), seed)
        assert found or not harmed, f"seed {seed}: verify has not seen {direct}"
        saved = answer(server.run("salvage", str(source), str(folder), str(rescued)), seed)
        assert not saved["wrong"], f"seed {seed}: {saved}"
        readable = direct.answer["right"] if direct.answer else saved["written"] // 2
        assert saved["kept"] >= readable, f"seed {seed}: {saved}, {direct}"
        harmful += harmed
        shutil.rmtree(folder)
        shutil.rmtree(rescued)
    return harmful


def answer(ended: ChildResult, seed: int) -> Any:
    assert not ended.signal, f"seed {seed}: killed by {ended.signal}"
    assert not ended.failure, f"seed {seed}: {ended.failure}"
    return ended.answer


@pytest.mark.sabotage("verify-blind", expects="verify has not seen")
def test_maintenance_handles_damage_of_any_page(server, filled, tmp_path):
    assert flip_pages(server, filled, tmp_path, PAGE_ROUNDS) > 0, "no flip did any harm"


def test_maintenance_finds_no_damage_in_an_intact_store(server, filled, tmp_path):
    assert server.ask("verify", str(filled)) == []
    saved = server.ask("salvage", str(filled), str(filled), str(tmp_path / "rescued"))
    assert saved["kept"] == saved["written"] > 0
    assert saved["wrong"] == 0


@pytest.mark.soak
def test_many_bit_flips(server, filled, tmp_path):
    flip_blocks(server, filled, SOAK_ROUNDS)
    assert flip_pages(server, filled, tmp_path, SOAK_PAGE_ROUNDS) > 0
