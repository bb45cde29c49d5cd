"""Breaks pirate's client on purpose, and demands that its tests notice.

    python tests/mutants/pirate_client.py [--unit | --live] [part of a mutant's name ...]

The same procedure as in bus.py: first the state folder alone, then with a real bus.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants import bus  # noqa: E402
from tests.mutants.bus import mutants  # noqa: E402

SUITES: dict[str, tuple[str, ...]] = {
    "unit": tuple(
        f"tests/unit/pirate/test_{name}.py" for name in ("state", "journal", "folder", "power")
    ),
    "live": tuple(
        f"tests/unit/pirate/test_{name}.py"
        for name in ("traces", "memories", "client", "answers", "shell", "curve")
    ),
}

STATE = mutants(
    "dialects/pirate/client/journal_state.py",
    ("an earlier epoch is accepted", "opened.epoch <= self.epoch or", ""),
    ("a repeated epoch is accepted", "opened.epoch <= self.epoch", "opened.epoch < self.epoch"),
    ("a lost counter is accepted", " or opened.highest < self.known", ""),
    (
        "the bus's counter is ignored",
        "        self.counter = max(self.counter, event.highest)\n",
        "",
    ),
    (
        "the known counter never goes back",
        "            self._doubt()\n            self.known = event.highest\n",
        "            self._doubt()\n",
    ),
    (
        "LAST goes back",
        "self.lasts[topic] = max(last, self.lasts.get(topic, 0))",
        "self.lasts[topic] = last",
    ),
    (
        "SUB may move LAST back",
        "self.lasts[topic] = max(value, self.lasts.get(topic, 0))",
        "self.lasts[topic] = value",
    ),
    ("UNSUB keeps LAST", "            self.lasts.pop(topic, None)\n", ""),
    ("doubt outlives UNSUB", "            self.doubted.discard(topic)\n", ""),
    ("trust keeps the doubt", "                self.doubted.clear()\n", ""),
    (
        "unread topics are doubted",
        "for topic, last in self.lasts.items() if last)",
        "for topic in self.lasts)",
    ),
)

JOURNAL = mutants(
    "dialects/pirate/client/client_journal.py",
    (
        "payload checksums are ignored",
        "if not whole or crc32(payload) != of_payload:",
        "if not whole:",
    ),
    (
        "length checksums are ignored",
        "whole = of_length == _length_checksum(length) and",
        "whole =",
    ),
    (
        "any tail counts as torn",
        "        if not events or not _is_torn(data[end:], end):",
        "        if not events:",
    ),
    (
        "a torn event is not cut off",
        "        os.ftruncate(descriptor, end)\n        os.fsync(descriptor)\n",
        "        pass\n",
    ),
    (
        "the state changes before the disk",
        "        data = encode_event(event)\n",
        "        data = encode_event(event)\n        self.state.apply(event)\n",
    ),
    (
        "a partial event is not cut off",
        "                os.ftruncate(self._descriptor, self._end)\n",
        "                pass\n",
    ),
    ("a broken journal is used", "        if self._broken:\n", "        if False:\n"),
    (
        "an unsynced new journal is used",
        "            if not _is_same_file(self._folder / NAME, self._descriptor):\n",
        "            if False:\n",
    ),
    (
        "the replaced journal is written",
        "        self._descriptor, self._end, self._compacted_bytes = descriptor, size, size\n",
        "        self._end, self._compacted_bytes = size, size\n",
    ),
    (
        "an interrupted rewrite is not removed",
        "        (folder / NEW).unlink()  # an interrupted rewrite\n",
        "        pass\n",
    ),
    ("folders are not synced", "            sync_folder(folder)\n", ""),
)

FOLDER = mutants(
    "dialects/pirate/client/state_folder.py",
    ("the folder is not locked", "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
    (
        "the folder's id is not checked",
        "elif client_id is not None and journal.state.id != client_id:",
        "elif False:",
    ),
    ("a lower position is written", "if last > self.state.lasts.get(topic, 0):", "if True:"),
    ("new folders are not synced", "        client_journal.sync_folder(path.parent)\n", ""),
    (
        "a closed folder is written",
        "        if self._closed:\n            raise NotConnected",
        "        if False:\n            raise NotConnected",
    ),
)

ASKING = mutants(
    "dialects/pirate/client/requester.py",
    (
        "the pending request is not sent first",
        "            left = await self._settle_pending()\n",
        "            left = None\n",
    ),
    (
        "forget keeps the epoch",
        "            opened = await self._hello()\n",
        "            opened = Opened(1, 0)\n",
    ),
    ("refusals are not recorded", "        if reply.code in FINAL_CODES:\n", "        if False:\n"),
    (
        "doubt is ignored",
        "            if topic in self.state.doubted:\n",
        "            if False:\n",
    ),
    ("the order is reversed", "            if record:\n", "            if not record:\n"),
    (
        "a cancelled reader loses a message",
        "self._undelivered[message.topic] = message\n",
        "pass\n",
    ),
    (
        "UNSUB keeps an undelivered message",
        "                self._undelivered.pop(topic, None)\n",
        "                pass\n",
    ),
    ("fenced is forgotten", "        if self._fenced is not None:\n", "        if False:\n"),
    ("the counter of a reply is not checked", " and reply.first != counter:", " and False:"),
    (
        "a reused id is accepted",
        "            if op == codec.PUT and value <= last and",
        "            if False and",
    ),
    ("a LAST too high is malformed", "reply.code == codec.MALFORMED and last:", "False:"),
    (
        "BUSY is not retried",
        "            if not busy or attempt == self._options.tries:",
        "            if True:",
    ),
    (
        "old messages are accepted",
        "            if reply.id <= last:\n",
        "            if False:\n",
    ),
    ("every HELLO has the same number", "int.from_bytes(os.urandom(8))", "7"),
    (
        "reread does nothing",
        "        if self._options.reread and self.state.doubted:\n",
        "        if False:\n",
    ),
)

LANE = mutants(
    "dialects/pirate/client/request_channel.py",
    (
        "the number of a reply is not checked",
        '            if reply[:2] == [number, b""]:\n',
        "            if True:\n",
    ),
    ("a request has one try", "range(self._options.tries):", "range(1):"),
    (
        "another mechanism is not reported",
        "            self._rejection.set_result(rejection)\n",
        "            pass\n",
    ),
    ("the client refuses sealed frames", "MAX_FRAME_BYTES + codec.SEALED_BYTES", "MAX_FRAME_BYTES"),
    (
        "moving bytes do not extend the timeout",
        "            if has_moved(before, mark):\n",
        "            if False:\n",
    ),
    (
        "sending has no timeout",
        "        if not await self._wait_done(timeout_s, sending):\n            return None\n",
        "        await sending\n",
    ),
)

# The bus's end of CURVE: whose tests are the client's.
LISTENER = mutants(
    "dialects/pirate/server/router_listener.py",
    ("a revoked key is accepted", "        if curve.is_allowed(key):\n", "        if True:\n"),
    (
        "a renamed key keeps its name",
        "connection.identity = self._curve.identify(connection.key)",
        "pass",
    ),
    ("the bus refuses sealed frames", "MAX_FRAME_BYTES + codec.SEALED_BYTES", "MAX_FRAME_BYTES"),
    ("the User-Id leaves no room for a message", "RECEIVE_HWM + COUNTED_USER_ID", "RECEIVE_HWM"),
    (
        "ambiguous connections stay ambiguous",
        "            self.connections.resolve_ambiguous(in_doubt)\n",
        "            pass\n",
    ),
)

CLIENT = mutants(
    "dialects/pirate/client/client.py",
    (
        "messages are not recorded",
        "                    await self.record(message)\n",
        "                    pass\n",
    ),
    (
        "messages never ends without wait",
        "            elif not wait:\n",
        "            elif False:\n",
    ),
    (
        "a failed open keeps the folder",
        "            await self.close()\n            raise\n",
        "            raise\n",
    ),
    (
        "recorded positions are not sent at close",
        "                        await self._requester.send_lasts()\n",
        "                        pass\n",
    ),
    (
        "bodies may be too large",
        "        if len(raw) > codec.MAX_MESSAGE_BYTES:\n",
        "        if False:\n",
    ),
)

ALL = [*STATE, *JOURNAL, *FOLDER, *ASKING, *LANE, *LISTENER, *CLIENT]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-pirate-client"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
