"""Sabotages of the coordinator of consumer groups."""

from __future__ import annotations

from tests.rig.patching import Edit, Patch

COORDINATOR = "groups/coordinator.py"
TIMER = "\n\nclass CoordinatorTimer:\n"
ACKING = """
    def _acking(self, topic, group, consumer, epoch):
        from types import SimpleNamespace

        from polybus.errors import Fenced

        try:
            return self._check_member(topic, group, consumer, epoch)
        except Fenced:
            return self._registry.get(topic, group), SimpleNamespace(max_deliver=5)
"""

SABOTAGES = [
    # Acks and transactions of members and shards with old epochs are taken.
    Patch(
        "fencing-off",
        "groups/shard_progress.py",
        "    if progress.owner != consumer or progress.epoch != epoch:\n",
        "    if False:\n",
        (
            Edit(
                COORDINATOR,
                "self._check_member(topic, group, consumer, epoch)\n        arguments",
                "self._acking(topic, group, consumer, epoch)\n        arguments",
            ),
            Edit(
                COORDINATOR,
                "self._check_member(topic, group, *member)\n        number, shard_epoch",
                "self._acking(topic, group, *member)\n        number, shard_epoch",
            ),
            Edit(COORDINATOR, TIMER, ACKING + TIMER),
        ),
    ),
    # Counts without an ack are written with the next ack.
    Patch(
        "counts-in-memory",
        "groups/acks.py",
        "    if progress != before or counted != before.counted:\n",
        "    if progress != before:\n",
    ),
    # A transaction is done again, though its message is acked.
    Patch(
        "repeats-off",
        "groups/acks.py",
        "        if offset_ranges.contains(progress.low, progress.ranges, offset):\n",
        "        if False:\n",
    ),
    # Retention trims messages although a group has not acked them.
    Patch(
        "unread-ignored",
        "durable/retention.py",
        "            drops_unread = limits.unread == DROP_UNREAD\n",
        "            drops_unread = True\n",
    ),
    # Messages whose time to live has passed are handed out.
    Patch(
        "ttl-ignored",
        "groups/message_expiry.py",
        "    return sorted(set(expired))  # a message may have the header twice\n",
        "    return ()\n",
    ),
    # A group reads new shards at once, before it has acked their parents.
    Patch(
        "seal-ignored",
        "groups/shard_phases.py",
        "            if not is_ready:\n",
        "            if False:\n",
    ),
]
