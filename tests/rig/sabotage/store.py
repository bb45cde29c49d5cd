"""Sabotages of the LMDB engine."""

from __future__ import annotations

from tests.rig.patching import Edit, Patch

WRITE = "        batch.encode_blocks()\n"
STAMPS_FILE = "store/lmdb/producer_stamps.py"
# Used by pirate's sabotage of epochs, too.
ANY_EPOCH = Edit(STAMPS_FILE, "    if epoch != producer.epoch:\n", "    if False:\n")

SABOTAGES = [
    # A repeated request is executed again.
    Patch(
        "stamps-off",
        STAMPS_FILE,
        "    if stamp.counter == producer.counter + 1:\n",
        "    if True:\n",
    ),
    # A fenced producer can continue.
    Patch("epochs-off", *ANY_EPOCH),
    # No commit waits for the disk.
    Patch(
        "sync-off",
        "store/lmdb/environment.py",
        "                meminit=True,\n",
        "                meminit=True,\n                sync=False, metasync=False,\n",
    ),
    # Checksums of entries and blocks are not compared.
    Patch(
        "checksum-off",
        "store/lmdb/log_entry.py",
        "read_head(value, MAGIC, True)",
        "read_head(value, MAGIC, False)",
        (
            Edit(
                "store/lmdb/entry_cursor.py",
                "open_layout(block, checksum=True, later=self._later)",
                "open_layout(block, checksum=False, later=False)",
            ),
        ),
    ),
    # Half of a batch is committed in a separate transaction.
    Patch(
        "torn-commits",
        "store/lmdb/write_txn.py",
        WRITE,
        WRITE
        + "        first = WriteBatch()\n"
        + "        first.puts = dict(sorted(batch.puts.items())[: len(batch.puts) // 2])\n"
        + "        with WriteTxn(self._files) as transaction:\n"
        + "            first.write(transaction)\n",
    ),
    # Commits of messages are acknowledged and not written. Topics, producers and records that no
    # message shares a transaction with are written, so that tests reach their assertions.
    Patch(
        "keep-nothing",
        "store/lmdb/write_txn.py",
        WRITE,
        WRITE + "        if batch.ends:\n            return\n",
    ),
    # With intervals, a batch that was acknowledged and could not be written is emptied before the
    # retry.
    Patch(
        "failed-batch-dropped",
        "store/lmdb/interval_writer.py",
        "            self._failure = error\n",
        "            self._failure = error\n            self._writing.puts.clear()\n",
    ),
    # The cache of the writer survives a failed transaction.
    Patch(
        "caches-kept",
        "store/lmdb/writer_state.py",
        "        self.batch = WriteBatch()\n"
        "        self.cache = StateCache(self._open_snapshot, self._quarantine)\n",
        "        self.batch = WriteBatch()\n",
    ),
    # Slots of dead readers are never cleared.
    Patch(
        "reader-check-off",
        "store/lmdb/environment.py",
        "        self.lmdb.reader_check()\n",
        "        pass\n",
    ),
    # A reader keeps its transaction open between reads.
    Patch(
        "long-read-transactions",
        "store/lmdb/store_files.py",
        "            self._transaction = used.lmdb.begin(buffers=True)\n",
        "            kept = used.__dict__.get('_kept')\n"
        "            self._transaction = kept or used.lmdb.begin(buffers=True)\n",
        (
            Edit(
                "store/lmdb/store_files.py",
                "            self._transaction.abort()\n",
                "            if self._used.read_only:\n"
                "                self._used.__dict__['_kept'] = self._transaction\n"
                "            else:\n"
                "                self._transaction.abort()\n",
            ),
        ),
    ),
    # A compacted store is used before it is on disk.
    Patch(
        "compact-sync-off",
        "store/lmdb/store_copy.py",
        "        os.fsync(descriptor)\n",
        "",
    ),
    # `verify` reads nothing and finds no fault.
    Patch(
        "verify-blind",
        "store/lmdb/verification.py",
        '    report, where = VerifyReport(), "the beginning"\n',
        '    report, where = VerifyReport(), "the beginning"\n    return report\n',
    ),
    # Each commit needs a file descriptor.
    Patch(
        "descriptor-a-commit",
        "store/lmdb/write_txn.py",
        WRITE,
        WRITE + "        os.close(os.open(os.devnull, os.O_RDONLY))\n",
    ),
    # The length of the data file is not compared with its last page.
    Patch(
        "size-check-off",
        "store/lmdb/store_files.py",
        "            data_file.check_length(generation / DATA)\n",
        "            pass\n",
    ),
    # Damaged topics are not looked for when the store is opened.
    Patch(
        "quarantine-off",
        "store/lmdb/lmdb_store.py",
        "quarantine.fill(topic_inspection.inspect_topics(transaction))",
        "quarantine.fill([])",
    ),
    # A full disk has no reserve for drops.
    Patch(
        "reserve-off",
        "store/lmdb/disk_reserve.py",
        "            self._path.unlink()\n        except OSError:\n            return False\n",
        "            return False\n        except OSError:\n            return False\n",
    ),
]
