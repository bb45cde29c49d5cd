"""Sabotages of pirate: its subscribers at the bus, and the journal of its client."""

from __future__ import annotations

from tests.rig.patching import Edit, Patch
from tests.rig.sabotage.store import ANY_EPOCH

PUTTING = "dialects/pirate/server/put_handler.py"
SUBSCRIBING = "dialects/pirate/server/subscribe_handler.py"
JOURNAL = "dialects/pirate/client/client_journal.py"

SUBSCRIBERS = [
    # A repeated counter is not answered from the stored result; its request is done again.
    Patch(
        "replies-off",
        PUTTING,
        "            self._max_bytes,\n            MAX_KNOWN_TOPICS,\n",
        "            -1,\n            MAX_KNOWN_TOPICS,\n",  # no put takes the fast path
        (
            Edit(
                PUTTING,
                "            put.then(subscriber_records.decode_outcome(result))\n",
                "            topic = self._durable.find(put.topic)\n"
                "            if result.duplicate and topic is not None:\n"
                "                self._durable.produce(topic, put.block)\n"
                "            put.then(subscriber_records.decode_outcome(result))\n",
            ),
            Edit(
                SUBSCRIBING, "        if request.counter > client.counter:\n", "        if True:\n"
            ),
            Edit(
                SUBSCRIBING,
                "        self._lasts.flush()  # positions that were read earlier are committed earlier\n",
                "        if request.counter <= client.counter:\n"
                "            stamp = None\n"
                "        self._lasts.flush()\n",
            ),
        ),
    ),
    # Each copy of a HELLO takes a new epoch.
    Patch(
        "greetings-off",
        "dialects/pirate/server/client_table.py",
        "        if epoch is None:\n            if record is None and self._refusal is not None:\n",
        "        if True:\n            if record is None and self._refusal is not None:\n",
    ),
    # The position of a subscriber is used, and not stored.
    Patch(
        "last-off",
        "dialects/pirate/server/get_handler.py",
        "        self._unsaved[moved] = None\n",
        "        pass\n",
    ),
    # Messages are removed before all subscribers have read them.
    Patch(
        "collect-all",
        "dialects/pirate/server/read_retention.py",
        "    if read is not None and read + 1 <= bounds.first_id:\n",
        "    if False:\n",
        (
            Edit(
                "dialects/pirate/server/read_retention.py",
                "    if read is None or read >= bounds.next_id - 1:\n",
                "    if True:\n",
            ),
        ),
    ),
    # A client goes on though a newer one with its id was started.
    Patch(
        "client-epochs-off",
        "dialects/pirate/server/client_table.py",
        "        return request.epoch != self.epoch\n",
        "        return False\n",
        (ANY_EPOCH,),
    ),
]

CLIENT = [
    # The journal is in memory alone.
    Patch("journal-off", JOURNAL, "        data = encode_event(event)\n", '        data = b""\n'),
    # No event waits for the disk.
    Patch(
        "journal-sync-off",
        JOURNAL,
        "            os.fdatasync(self._descriptor)\n",
        "            pass\n",
    ),
    # A rewritten journal is used before it is on disk.
    Patch(
        "journal-rename-unsynced",
        JOURNAL,
        "            _write(descriptor, data, 0)\n            os.fsync(descriptor)\n",
        "            _write(descriptor, data, 0)\n",
        (
            Edit(
                JOURNAL,
                '    """Sync the names of a folder."""\n',
                '    """Sync the names of a folder."""\n    return\n',
            ),
        ),
    ),
]

SABOTAGES = [*SUBSCRIBERS, *CLIENT]
