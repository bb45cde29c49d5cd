"""The memory that a reader holds is in proportion to its charged bytes."""

from __future__ import annotations

from tests.faults.freud_live import connect, serving
from tests.rig import rqueue_client
from tests.rig.freud_client import OK, create, get, produce
from tests.rig.observer import count, rss_bytes, until

ROOM = 100  # of the reader, in bytes, and all of it is taken
BATCHES = 1000
LARGE, LARGE_IN_A_BATCH = 2000, 100
SENT = BATCHES * LARGE * LARGE_IN_A_BATCH


def test_small_message_does_not_hold_the_large_ones_of_its_batch_in_memory():
    """Only the empty message of each batch fits; it must not keep the batch in memory."""
    with serving(env={"POLYBUS_QUOTAS_QUOTA_BYTES": str(ROOM)}) as bus, connect(bus) as client:
        assert client.ask(create(b"t")).code == OK
        key = client.subscribe(b"t")
        client.ask(produce(b"t", bytes(ROOM)))
        batch = (
            rqueue_client.publish(b"t")
            + rqueue_client.publish(b"t", bytes(LARGE)) * LARGE_IN_A_BATCH
        )
        before = rss_bytes(bus.pid)
        with rqueue_client.connect(bus.address("rqueue")) as pusher:
            for _ in range(BATCHES):
                pusher.send(batch)
            lost = BATCHES * LARGE_IN_A_BATCH
            until(lambda: count(bus, "dropped", "quota_bytes") == lost, "all large ones are lost")
        held = rss_bytes(bus.pid) - before
        assert held < SENT // 5, f"{held} bytes for {ROOM} that are charged"
        client.send(*(get(key) for _ in range(1 + BATCHES)))
        assert {one.code for one in client.answers(1 + BATCHES)} == {OK}
