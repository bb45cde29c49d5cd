"""Journals survive their processes and become the history of a round."""

from __future__ import annotations

import signal

from tests.rig.fdq.child_pool import ClientPool
from tests.rig.fdq.clients import Orders
from tests.rig.fdq.history import (
    ACK,
    ASSIGNED,
    COMMIT,
    FAILED,
    OK,
    PRODUCE,
    RUN,
    UNSENT,
    Message,
    history_of,
)
from tests.rig.fdq.journal import NEVER_NS, UNKNOWN, Journal, operations
from tests.rig.fdq.snapshot import output_body, run_of, source_of
from tests.rig.observer import until


def test_unfinished_call_has_an_unknown_outcome(tmp_path):
    journal = Journal(tmp_path / "x")
    first, second = journal.begin("produce", body="a"), journal.begin("produce", body="b")
    journal.end(first, OK, first_id=7)
    done, open_ = operations("p", tmp_path / "x")
    assert (done.outcome, done.answer, done.fields) == (OK, {"first_id": 7}, {"body": "a"})
    assert done.began_ns <= done.ended_ns < NEVER_NS
    assert (open_.outcome, open_.ended_ns, open_.process) == (UNKNOWN, NEVER_NS, "p")
    assert second > first


def test_truncated_line_is_ignored(tmp_path):
    path = tmp_path / "x"
    journal = Journal(path)
    journal.end(journal.begin("produce"), OK)
    for cut in range(1, len(path.read_bytes().splitlines(keepends=True)[1])):
        (tmp_path / "cut").write_bytes(path.read_bytes()[:-cut])
        assert [one.outcome for one in operations("p", tmp_path / "cut")] == [UNKNOWN]


def test_journals_become_a_history(tmp_path):
    journal = Journal(tmp_path / "x")
    journal.note(ASSIGNED, shard=1, epoch=2)
    journal.end(journal.begin(PRODUCE, producer="w", messages=[Message("k", "m", True)]), OK)
    where = {"epoch": 2, "shard": 1, "offset": 0}
    journal.end(journal.begin(RUN, **where, key="k", body="m", delivery=1), FAILED)
    journal.begin(COMMIT, **where, outputs=["m|r|0"])
    journal.end(journal.begin(COMMIT, **where, outputs=["m|r|1"]), UNSENT)
    shards = [{"shard": number, "epoch": 2, "acked": [[0, 3]]} for number in (1, 2)]
    journal.end(journal.begin(ACK, shards=shards), OK, refused=[2])
    found = history_of(operations("c", tmp_path / "x"), max_deliver=3, is_exact=False)
    assert [(one.consumer, one.shard, one.epoch) for one in found.assigned] == [("c", 1, 2)]
    assert found.produced[0].messages == (Message("k", "m", True),)
    assert (found.runs[0].outcome, len(found.commits)) == (FAILED, 1)
    assert found.commits[0].outcome == UNKNOWN
    assert [(ack.shard, ack.outcome, ack.ranges) for ack in found.acks] == [
        (1, OK, ((0, 3),)),
        (2, FAILED, ((0, 3),)),
    ]
    assert (found.max_deliver, found.is_exact) == (3, False)


def test_output_names_its_origin():
    body = output_body("w1 7 moved", "c1/3", 0)
    assert (source_of(body), run_of(body)) == ("w1 7 moved", "c1/3")


def test_children_are_stopped_killed_and_waited_for(tmp_path):
    with ClientPool() as pool:
        orders = [Orders("polybus://127.0.0.1:1", name, str(tmp_path)) for name in "ab"]
        first, second = (pool.start("produce", one) for one in orders)
        assert not first.has_ended
        second.signal(signal.SIGSTOP)
        first.signal(signal.SIGKILL)
        second.signal(signal.SIGKILL)
        until(lambda: first.has_ended and second.has_ended, "they end")
        for child in (first, second):
            assert child.wait() == -signal.SIGKILL
            assert child.wait() == -signal.SIGKILL


def test_failed_child_reports_its_error(tmp_path):
    with ClientPool() as pool:
        child = pool.start("produce", Orders("nonsense://", "a", str(tmp_path)))
        assert child.wait() == 1
        assert "nonsense" in child.orders.log.read_text()
