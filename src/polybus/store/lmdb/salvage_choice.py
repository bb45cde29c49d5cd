"""Which of several pieces is right, where a raw file says different things of an offset.

Most that overlap say the same: blocks from before and after they were merged. Where
they do not, one is what a crash kept from being committed, and its offsets were given
again afterwards: the later time is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from polybus.model import run_table as runs
from polybus.store.lmdb.raw_file import RawEntry


class SalvagePiece(NamedTuple):
    """Messages of a shard, offsets `first` to `end`: those from `place` on in a block."""

    first: int
    end: int
    runs: bytes  # of these messages
    found: RawEntry
    place: int = 0

    def time_at(self, offset: int) -> int:
        return runs.time_at(self.runs, offset - self.first)

    def cut(self, start: int, end: int) -> SalvagePiece:
        if (start, end) == (self.first, self.end):
            return self
        by = start - self.first
        table = runs.cut_runs(self.runs, by, end - self.first)
        return SalvagePiece(start, end, table, self.found, self.place + by)


def choose_pieces(pieces: list[SalvagePiece]) -> Iterator[SalvagePiece]:
    """Pieces in order that do not overlap: for each offset the right one."""
    pieces = sorted(pieces, key=lambda piece: piece.first)
    covering: list[SalvagePiece] = []
    at = following = 0
    while covering or following < len(pieces):
        at = at if covering else max(at, pieces[following].first)
        while following < len(pieces) and pieces[following].first <= at:
            covering.append(pieces[following])
            following += 1
        covering = [piece for piece in covering if piece.end > at]
        if covering:
            best = max(covering, key=lambda piece: (piece.time_at(at), piece.end))
            end = _valid_until(best, pieces, following)
            yield best.cut(at, end)
            at = end


def _valid_until(best: SalvagePiece, pieces: list[SalvagePiece], following: int) -> int:
    """Up to where no later piece knows better."""
    while following < len(pieces) and pieces[following].first < best.end:
        piece = pieces[following]
        following += 1
        if piece.time_at(piece.first) > best.time_at(piece.first):
            return piece.first
    return best.end
