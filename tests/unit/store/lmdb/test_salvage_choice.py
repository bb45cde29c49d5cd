"""If a raw file has several entries for an offset, salvage takes the latest."""

from __future__ import annotations

import pytest

from polybus.model import run_table
from polybus.store.lmdb import log_entry
from polybus.store.lmdb.log_entry import LogEntry
from polybus.store.lmdb.salvage import RawEntry, SalvagePiece, choose_pieces


def piece(first: int, end: int, time: int) -> SalvagePiece:
    found = RawEntry(LogEntry(log_entry.BLOCK, 1, 0, first, end - first, 0), at=0)
    return SalvagePiece(first, end, run_table.make_table(100 + first, time, end - first), found)


@pytest.mark.parametrize(
    ("pieces", "chosen"),
    [
        ([], []),
        ([(0, 5, 1)], [(0, 5, 1)]),
        ([(0, 5, 1), (5, 7, 2)], [(0, 5, 1), (5, 7, 2)]),
        ([(5, 7, 2), (0, 3, 1)], [(0, 3, 1), (5, 7, 2)]),
        # a merged entry, and its parts from before the merge
        ([(0, 2, 1), (2, 6, 1), (0, 6, 1)], [(0, 6, 1)]),
        # an uncommitted entry, and the committed one at its offset
        (
            [(0, 4, 1), (4, 9, 2), (4, 6, 3), (6, 8, 4)],
            [(0, 4, 1), (4, 6, 3), (6, 8, 4), (8, 9, 2)],
        ),
        ([(0, 9, 1), (3, 5, 2)], [(0, 3, 1), (3, 5, 2), (5, 9, 1)]),
    ],
)
def test_newest_pieces_are_chosen_without_overlap(pieces, chosen):
    found = [
        (one.first, one.end, one.time_at(one.first))
        for one in choose_pieces([piece(*fields) for fields in pieces])
    ]
    assert found == chosen


def test_cut_piece_keeps_its_position_in_the_block():
    cut = piece(10, 20, 1).cut(13, 15)
    assert (cut.first, cut.end, cut.place) == (13, 15, 3)
    assert run_table.read_runs(cut.runs) == [(113, 1, 2)]
