"""Sabotages of FDQ: its consumer, and delayed messages."""

from __future__ import annotations

from tests.rig.patching import Patch

SABOTAGES = [
    # Due messages are appended in one commit, and their records removed in a second one.
    Patch(
        "delay-removed-apart",
        "durable/delayed_messages.py",
        "            self._topics.commit(Commit(appends, changes=removals)).result()\n",
        "            self._topics.commit(Commit(appends)).result()\n"
        "            self._store.commit(Commit(changes=removals)).result()\n",
    ),
    # Messages that a dead consumer had fetched are run as if they were new.
    Patch(
        "care-off",
        "dialects/fdq/client/assigned_shards.py",
        'self.suspect_to = int(assignment.get("suspect_to") or 0)',
        "self.suspect_to = 0",
    ),
    # All messages of the last runs of a batch count as running.
    Patch(
        "last-runs-together",
        "dialects/fdq/client/handler_run.py",
        "        return range(self.offset, self.offset + 1)\n",
        "        return range(self._first, self._first + int(self.batch.num_rows))\n",
    ),
    # Acks that could not be sent are dropped.
    Patch(
        "acks-forgotten",
        "dialects/fdq/client/acker.py",
        "        self.shard.restore_unsent_acks(self._acked)\n"
        "        self.shard.failures.extendleft(reversed(self._failures))\n",
        "        pass\n",
    ),
    # A consumer that was taken for dead does not join again.
    Patch(
        "rejoin-off",
        "dialects/fdq/client/group_member.py",
        "            if epoch != self.epoch or self.is_leaving:\n",
        "            if True:\n",
    ),
]
