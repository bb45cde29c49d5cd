"""A client that is killed at every point of its work, and started again, counts and reads once.

One client is started many times. Each run is killed at the next point, and the last one ends.
The body of each PUT is its counter, so that the topic shows whether each was put once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from polybus.dialects.pirate.client.pirate_options import Order
from tests.rig.pirate.kill_points import killed_at
from tests.rig.points import PIRATE

CHILD = """
import os, sys
from polybus import pirate
from polybus.dialects.pirate.client.pirate_options import Order

endpoint, state, topic, diary, order, wanted = sys.argv[1:]
notes = os.open(diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def note(*words):
    os.write(notes, (" ".join(map(str, words)) + "\\n").encode())

with pirate.blocking.connect(endpoint, state=state, timeout_s=10) as client:
    client.resume()
    if client.outcome is not None:
        note("put", client.outcome.counter, client.outcome.value)
    for counter in range(client.counter + 1, int(wanted) + 1):
        if counter == 1:
            note("put", 1, client.subscribe(topic))
        else:
            note("put", counter, client.put(topic, str(counter).encode()))
        message = client.get(topic, order=order)
        if message is not None:
            note("got", message.id, message.body.decode())
            if order == Order.DELIVER_THEN_RECORD:
                client.record(message)
    while (message := client.get(topic, order=order)) is not None:
        note("got", message.id, message.body.decode())
        if order == Order.DELIVER_THEN_RECORD:
            client.record(message)
note("end")
"""
KILLS = {
    Order.RECORD_THEN_DELIVER: [("asked", 2), ("settled", 2), ("recorded", 2), ("torn", 4)],
    Order.DELIVER_THEN_RECORD: [("answered", 2), ("fetched", 2), ("kept", 3)],
}
PUTS = 20


class Lives:
    """The runs of one client, and the diary that all of them write."""

    def __init__(self, endpoint: str, folder: Path, topic: str, order: Order) -> None:
        self.diary = folder / "diary"
        self._env = os.environ | PIRATE.environment
        what = (endpoint, folder / "state", topic, self.diary, order, PUTS)
        self._command = [sys.executable, "-c", CHILD, *map(str, what)]

    def live(self, **env: str) -> int:
        return subprocess.run(self._command, env=self._env | env, timeout=60).returncode

    def noted(self, kind: str) -> list[list[str]]:
        words = [line.split() for line in self.diary.read_text().splitlines()]
        return [one[1:] for one in words if one[0] == kind]


@pytest.mark.sabotage("journal-off", expects=r"assert \{1: 0, .*\} == \{1: 0, 2: 1, ")
@pytest.mark.parametrize("order", list(Order))
def test_client_killed_at_every_point_counts_and_reads_once(
    opening, keeper, endpoint, topic, tmp_path, order
):
    lives = Lives(endpoint, tmp_path, topic, order)
    for point, passings in KILLS[order]:
        code = lives.live(**killed_at(point, passings))
        assert code == -signal.SIGKILL, f"it lived past {point}, with {code}"
    assert lives.live() == 0
    # In the topic is each counter once, in order: the first was the SUB's.
    put = [one.body.decode() for one in keeper.messages(topic, wait=False)]
    assert put == [str(counter) for counter in range(2, PUTS + 1)]
    # Every life knows how the last request before it ended.
    known = {int(counter): int(value) for counter, value in lives.noted("put")}
    assert known == {counter: max(0, counter - 1) for counter in range(1, PUTS + 1)}
    # Every message was read once, but those that a kill met on their way.
    read = Counter(int(number) for number, _ in lives.noted("got"))
    missed = [number for number in range(1, PUTS) if not read[number]]
    doubled = [number for number in read if read[number] > 1]
    reads_killed = sum(point not in ("asked", "answered", "settled") for point, _ in KILLS[order])
    if order is Order.RECORD_THEN_DELIVER:
        assert not doubled
        assert len(missed) <= reads_killed
    else:
        assert not missed
        assert sum(read[number] - 1 for number in doubled) <= reads_killed
