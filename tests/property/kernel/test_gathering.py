"""Reads over pieces of many blocks, compared with the oracle's, row by row."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from polybus.model import run_table
from polybus.model.arrow import batch_of
from polybus.model.block import Layout, gather
from polybus.testing.conformance.sample_blocks import messages
from tests.property.kernel.block_values import build, message_lists, plain
from tests.rig.oracle import blocks as oracle


@st.composite
def topics(draw: st.DrawFn) -> list[oracle.Piece]:
    """A topic's commits in the order of their ids, each a run in one of its shards' blocks."""
    shards = draw(st.integers(1, 3))
    commits = draw(
        st.lists(st.tuples(st.integers(0, shards - 1), message_lists(max_size=4)), max_size=8)
    )
    next_id, time = draw(st.integers(0, 5)), 0
    pieces: list[oracle.Piece] = []
    open_blocks: dict[int, tuple[list[oracle.Message], list[tuple[int, int, int]], int]] = {}
    ends = dict.fromkeys(range(shards), 0)
    for shard, sent in commits:
        time += draw(st.integers(0, 2))
        if shard in open_blocks and draw(st.booleans()):
            pieces.append(whole(shard, *open_blocks.pop(shard)))
        found, table, _ = open_blocks.setdefault(shard, ([], [], ends[shard]))
        found += sent
        table.append((next_id, time, len(sent)))
        next_id += len(sent)
        ends[shard] += len(sent)
    pieces += [whole(shard, *left) for shard, left in open_blocks.items()]
    return sorted(pieces, key=lambda piece: (piece.shard, piece.first_offset))


def whole(
    shard: int, found: list[oracle.Message], table: list[tuple[int, int, int]], first: int
) -> oracle.Piece:
    return oracle.Piece(found, table, first, shard, 0, len(found))


@st.composite
def reads(draw: st.DrawFn) -> tuple[list[oracle.Piece], int, int, int, int]:
    pieces: list[oracle.Piece] = draw(topics())
    inside: bool = draw(st.booleans())
    if pieces and inside:  # a read that begins and ends inside a block
        first = pieces[0]
        start = draw(st.integers(0, first.end))
        end = draw(st.integers(start, first.end))
        pieces[0] = oracle.Piece(
            first.messages, first.runs, first.first_offset, first.shard, start, end
        )
    from_id = draw(st.sampled_from([0, 0, 3, 9]))
    below_id = draw(st.sampled_from([2**63 - 1, 2**63 - 1, 4, 12]))
    max_rows = draw(st.sampled_from([1, 2, 5, 1000]))
    max_bytes = draw(st.sampled_from([1, 20, 50, 1 << 20]))
    return pieces, from_id, below_id, max_rows, max_bytes


def kernel_pieces(
    pieces: list[oracle.Piece],
) -> list[tuple[Layout, bytes, int, int, int, int]]:
    return [
        (
            build(list(piece.messages)).layout(),
            run_table.join_tables(*(run_table.make_table(*run) for run in piece.runs)),
            piece.first_offset,
            piece.shard,
            piece.start,
            piece.end,
        )
        for piece in pieces
    ]


def expected(rows: list[oracle.Row]) -> list[tuple[object, ...]]:
    return [(row.id, row.shard, row.offset, row.timestamp_ns, *plain(row.message)) for row in rows]


@given(reads(), st.booleans())
def test_reads_are_the_oracle_s(read, by_piece):
    pieces, *bounds = read
    from_id, below_id, max_rows, max_bytes = bounds
    rows = oracle.gather(pieces, from_id, below_id, max_rows, max_bytes, by_piece=by_piece)
    found = gather(
        kernel_pieces(pieces),
        from_id=from_id,
        below_id=below_id,
        max_rows=max_rows,
        max_bytes=max_bytes,
        by_piece=by_piece,
    )
    assert [tuple(one) for one in messages(found)] == expected(rows)
    assert found.size_bytes == sum(row.weight for row in rows)
    keys = [row.message.key is not None for row in rows]
    headers = [row.message.headers is not None for row in rows]
    assert (found.keys is not None, found.header_names is not None) == (any(keys), any(headers))
    assert (found.key_validity is not None) == (any(keys) and not all(keys))
    assert (found.header_validity is not None) == (any(headers) and not all(headers))


@given(reads())
def test_gathered_rows_are_valid_arrow(read):
    pieces, from_id, below_id, max_rows, max_bytes = read
    found = gather(
        kernel_pieces(pieces),
        from_id=from_id,
        below_id=below_id,
        max_rows=max_rows,
        max_bytes=max_bytes,
    )
    batch = batch_of(found)
    batch.validate(full=True)
    assert batch.column("body").to_pylist() == [one.body for one in messages(found)]
    assert batch.column("shard_key").to_pylist() == [one.key for one in messages(found)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_a_block_of_many_runs_reads_as_its_messages(counts, data):
    """Ids with gaps between runs, as in one shard of several."""
    total = sum(counts)
    sent = [oracle.Message(place, b"%d" % place) for place in range(total)]
    starts = accumulate(counts[:-1], initial=0)
    table = [
        (start * 10, number, count)
        for number, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    start = data.draw(st.integers(0, total))
    piece = oracle.Piece(sent, table, 100, 2, start, total)
    bounds = (data.draw(st.integers(0, 60)), data.draw(st.integers(0, 300)), 1000, 1 << 20)
    found = gather(
        kernel_pieces([piece]),
        from_id=bounds[0],
        below_id=bounds[1],
        max_rows=1000,
        max_bytes=1 << 20,
    )
    rows = oracle.gather([piece], *bounds)
    assert [tuple(one) for one in messages(found)] == expected(rows)
