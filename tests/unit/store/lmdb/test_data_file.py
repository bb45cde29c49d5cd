"""The length of the data file: a cut one is refused, a whole one never."""

from __future__ import annotations

import os
import random
from pathlib import Path

import lmdb
import pytest

from polybus.errors import Damaged
from polybus.store.lmdb.data_file import check_length

SEEDS = 30
TRANSACTIONS = 120
SIZES = (10, 900, 3000, 5000, 60_000)
PAGE_BYTES = 4096


def change_some(environment: lmdb.Environment, choices: random.Random) -> None:
    """Put and delete in one transaction, which may free pages that it has taken."""
    with environment.begin(write=True) as transaction:
        for _ in range(choices.randrange(1, 60)):
            key = b"%d" % choices.randrange(400)
            if choices.random() < 0.5:
                transaction.put(key, bytes(choices.choice(SIZES)))
            else:
                transaction.delete(key)


def test_file_without_its_last_free_pages_is_whole(tmp_path):
    short = 0
    for seed in range(SEEDS):
        folder, choices = tmp_path / str(seed), random.Random(seed)
        path = folder / "data.mdb"
        with lmdb.open(str(folder), map_size=1 << 30, sync=False) as environment:
            for _ in range(TRANSACTIONS):
                change_some(environment, choices)
                check_length(path)
                pages = environment.info()["last_pgno"] + 1
                short += path.stat().st_size < pages * PAGE_BYTES
    assert short > 0, "no file was shorter than its last page number"


def filled(tmp_path: Path) -> Path:
    with lmdb.open(str(tmp_path), map_size=1 << 30) as environment:
        for number in range(50):
            with environment.begin(write=True) as transaction:
                transaction.put(b"%d" % number, bytes(10_000))
    return tmp_path / "data.mdb"


def test_every_cut_is_refused(tmp_path):
    path = filled(tmp_path)
    pages = path.stat().st_size // PAGE_BYTES
    for left in range(pages - 1, -1, -7):
        os.truncate(path, left * PAGE_BYTES)
        with pytest.raises(Damaged, match=r"cut off.*polybus store salvage"):
            check_length(path)
        os.truncate(path, left * PAGE_BYTES + 1)  # part of a page does not count
        with pytest.raises(Damaged, match="cut off"):
            check_length(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(Damaged, match="is missing"):
        check_length(tmp_path / "data.mdb")


def test_file_that_is_not_of_lmdb_is_left_to_lmdb(tmp_path):
    path = tmp_path / "data.mdb"
    path.write_bytes(b"not a database " * 1000)
    check_length(path)
