"""Groups as rows: how long acks take, out of a histogram."""

from __future__ import annotations

import math

import pytest

from polybus.cli.group_table import quantile_ms, show_groups


@pytest.mark.parametrize(
    ("histogram", "share", "bound_ms"),
    [
        ({}, 0.5, None),
        ({"1": 0, "inf": 0}, 0.99, None),
        ({"1": 1}, 0.5, 1.0),
        ({"1": 50, "2": 49, "10": 1}, 0.5, 1.0),
        ({"1": 50, "2": 49, "10": 1}, 0.99, 2.0),
        ({"10": 2, "2": 49, "1": 49}, 0.99, 10.0),
        ({"1": 1, "inf": 99}, 0.5, math.inf),
    ],
)
def test_latency_percentiles_from_the_histogram(histogram, share, bound_ms):
    assert quantile_ms(histogram, share) == bound_ms


def test_groups_and_their_shards_are_rows(capsys):
    counts = {"lag": 3, "lag_s": 1.25, "acked": 7, "emitted": 9, "redelivered": 2}
    counts["dead_lettered"] = 1
    shards = [{"shard": 0, "owner": "a", **counts}, {"shard": 1, "owner": None, **counts}]
    latency = {"1": 0, "5": 9, "inf": 1}
    group = {"group": "g", "members": ["a"], "shards": shards, "ack_latency": latency, **counts}
    show_groups([group], by_shard=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:9] == ["g", "1", "3", "1.2", "7", "9", "2", "1", "0"]
    assert lines[1].split()[9:] == ["≤", "5", "more", "-"]
    assert lines[2].split()[:3] == ["shard", "0", "a"]
    assert lines[3].split()[:4] == ["shard", "1", "-", "3"]
    for number in (2, 3):
        shards.append({"shard": number, "owner": None, "phase": "drained", **counts})
    show_groups([group], by_shard=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[4].split()[:4] == ["drained", "2", "shards", "6"]
    show_groups([group], by_shard=False)
    assert len(capsys.readouterr().out.splitlines()) == 2
