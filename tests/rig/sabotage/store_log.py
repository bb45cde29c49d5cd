"""Sabotages of the file log."""

from __future__ import annotations

from tests.rig.patching import Edit, Patch

FILE = "store/log/file_log.py"
RECOVERY = "store/log/recovery.py"

SABOTAGES = [
    # Appends resolve before they are on disk.
    Patch(
        "log-sync-off",
        FILE,
        "            if self._interval_s is None:\n                segment.sync()\n",
        "",
    ),
    # A segment gets its blocks when records are written, which a full disk fails.
    Patch(
        "log-room-unchecked",
        "store/log/segment.py",
        "                segment.write([_ZEROS[: size - offset]], offset)\n",
        "                os.truncate(unfinished, size)\n",
        (
            Edit(
                "store/log/segment.py",
                "        if disk.f_bavail * disk.f_frsize < size:\n",
                "        if False:\n",
            ),
        ),
    ),
    # A failed sync counts as done.
    Patch(
        "log-failed-sync-ignored",
        FILE,
        "            self._fail(error, group)\n"
        "            if not isinstance(error, Exception):\n"
        "                raise\n"
        "            return False\n",
        "            pass\n",
    ),
    # Any bytes behind a head are a payload.
    Patch(
        "log-checksum-off",
        "store/log/codec.py",
        "    return xxhash.xxh64_intdigest(hashed, head.log_id) == head.checksum\n",
        "    return True\n",
    ),
    # Old records of a reused segment continue the log.
    Patch(
        "log-stale-accepted",
        RECOVERY,
        "        return (head.number == last.number + 1 or not last.number)"
        " and head.epoch >= last.epoch\n",
        "        return True\n",
    ),
    # A segment is reused while a record of it is not yet trimmed.
    Patch(
        "log-reused-early",
        "store/log/segment_pool.py",
        "        return len(self.used) > 1 and self.used[1].first <= start\n",
        "        return len(self.used) > 1 and self.used[0].first < start\n",
    ),
    # Recovery shows records that are only in the page cache.
    Patch("log-recovery-unsynced", RECOVERY, "        _write_unsynced(end)\n", ""),
    # Damage of acknowledged records is taken for the end of the log.
    Patch(
        "log-damage-ignored",
        RECOVERY,
        "            if head.synced >= expected:\n",
        "            if False:\n",
    ),
    # The mark of a clean close stays where records follow.
    Patch(
        "log-mark-kept",
        RECOVERY,
        "    if end.is_closed:\n        # Before",
        "    if False:\n        # Before",
    ),
]
