"""Run tables, compared with the plain list of ids and times that they stand for."""

from __future__ import annotations

import pytest

from polybus.errors import Damaged
from polybus.model import run_table

TABLE = run_table.join_tables(
    run_table.make_table(5, 10, 3), run_table.make_table(8, 20, 1), run_table.make_table(12, 20, 2)
)
PLAIN = [(5, 10), (6, 10), (7, 10), (8, 20), (12, 20), (13, 20)]


def plain(table: bytes) -> list[tuple[int, int]]:
    return [
        (run.first_id + number, run.timestamp_ns)
        for run in run_table.read_runs(table)
        for number in range(run.count)
    ]


def test_a_table_stands_for_its_messages():
    assert plain(TABLE) == PLAIN
    assert run_table.count_messages(TABLE) == len(PLAIN)


def test_consecutive_runs_are_joined():
    assert run_table.join_tables(
        run_table.make_table(1, 7, 2), run_table.make_table(3, 7, 4)
    ) == run_table.make_table(1, 7, 6)


def test_another_time_or_a_gap_is_another_run():
    assert (
        len(
            run_table.read_runs(
                run_table.join_tables(run_table.make_table(1, 7, 2), run_table.make_table(3, 8, 4))
            )
        )
        == 2
    )
    assert (
        len(
            run_table.read_runs(
                run_table.join_tables(run_table.make_table(1, 7, 2), run_table.make_table(4, 7, 4))
            )
        )
        == 2
    )


def test_empty_tables_join():
    assert run_table.join_tables() == b""
    assert run_table.join_tables(b"", TABLE, b"") == TABLE


def test_every_cut_is_the_cut_of_the_list():
    for start in range(len(PLAIN) + 1):
        for end in range(start, len(PLAIN) + 1):
            assert plain(run_table.cut_runs(TABLE, start, end)) == PLAIN[start:end]


def test_cuts_join_to_the_whole():
    for place in range(len(PLAIN) + 1):
        halves = run_table.cut_runs(TABLE, 0, place), run_table.cut_runs(TABLE, place, len(PLAIN))
        assert run_table.join_tables(*halves) == TABLE


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 7)])
def test_a_cut_lies_in_the_table(start, end):
    with pytest.raises(IndexError):
        run_table.cut_runs(TABLE, start, end)


def test_every_place_has_its_id_and_time():
    for place, (number, time) in enumerate(PLAIN):
        assert (run_table.id_at(TABLE, place), run_table.time_at(TABLE, place)) == (number, time)
    for place in (-1, len(PLAIN)):
        with pytest.raises(IndexError):
            run_table.id_at(TABLE, place)


def test_places_are_found_by_id():
    for wanted in range(16):
        expected = sum(number < wanted for number, _ in PLAIN)
        assert run_table.place_of_id(TABLE, wanted) == expected


def test_places_are_found_by_time():
    for wanted in range(25):
        assert run_table.place_of_time(TABLE, wanted) == sum(time < wanted for _, time in PLAIN)


def test_any_buffer_is_a_table():
    view = memoryview(b"x" + TABLE)[1:]
    assert run_table.join_tables(view) == TABLE
    assert run_table.id_at(view, 3) == 8


def test_a_torn_table_is_damage():
    with pytest.raises(Damaged):
        run_table.count_messages(TABLE[:-1])
