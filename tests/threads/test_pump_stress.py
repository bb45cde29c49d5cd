"""The pump's threads: no races, nothing lost, nothing reordered, counters exact.

The sabotages of the first test remove a lock or weaken an atomic operation, which
ThreadSanitizer must report at the function that they guard. Those of the second one break the
queues, which the clients or the counters of the program must notice.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.rig import pump_stress


@pytest.mark.sabotage("push-unlocked", expects=r"data race[\s\S]*pb_outbox_push", tries=3)
@pytest.mark.sabotage("route-unlocked", expects=r"data race[\s\S]*pb_scan", tries=3)
@pytest.mark.sabotage("change-stops-no-worker", expects=r"data race[\s\S]*pb_scan", tries=3)
@pytest.mark.sabotage("mailbox-unlocked", expects=r"data race[\s\S]*pb_mailbox_post", tries=3)
@pytest.mark.sabotage("requests-unlocked", expects=r"data race[\s\S]*pb_stream_request", tries=3)
@pytest.mark.sabotage("full-stored-plainly", expects=r"data race[\s\S]*mark_reader", tries=3)
@pytest.mark.sabotage("next-id-added-plainly", expects=r"data race[\s\S]*topic_advance", tries=3)
@pytest.mark.sabotage("chunk-release-relaxed", expects=r"data race[\s\S]*pb_chunk_", tries=3)
@pytest.mark.sabotage("events-without-reference", expects=r"heap-use-after-free", tries=3)
def test_threads_have_no_races(tmp_path: Path) -> None:
    program = pump_stress.build(tmp_path, "thread")
    pump_stress.run(program, 4, 3, random.randrange(1 << 32)).require_clean()


@pytest.mark.sabotage("held-never-routed", expects="hung in stage")
@pytest.mark.sabotage("push-overtakes-held", expects="'(reordered|lost|corrupt)'", tries=3)
@pytest.mark.sabotage("sent-part-sent-again", expects="'corrupt'|hung in stage", tries=3)
@pytest.mark.sabotage("full-readers-ignored", expects="'over_bound'", tries=3)
@pytest.mark.sabotage("overflow-accepts-more", expects="'over_bound'", tries=5)
@pytest.mark.sabotage("drops-uncounted", expects="'miscounted'", tries=3)
@pytest.mark.sabotage("consumed-routed-again", expects="'reordered'", tries=3)
def test_messages_arrive_once_and_in_order(tmp_path: Path) -> None:
    program = pump_stress.build(tmp_path, "plain")
    pump_stress.run(program, 8, 3, random.randrange(1 << 32)).require_clean()
