"""Random appends, trims, reopens and crashes: a file log must match a list of records."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.errors import StoreFull
from polybus.store.engine import Durability
from polybus.store.log.file_log import FileLog
from polybus.store.log.write_ahead_log import LogRecord

SEGMENT_BYTES = 64 << 10
FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, 40_000), min_size=1, max_size=6)),
        st.tuples(st.just("trim"), st.integers(0, 12)),
        st.tuples(st.just("reopen"), st.just(0)),
        st.tuples(st.just("crash"), st.just(0)),
    ),
    max_size=40,
)


class Trial:
    """A log, and the records that it must have."""

    def __init__(self, durability: Durability) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="polybus-", dir=FOLDER))
        self._durability = durability
        self._turn = 0
        self.records: dict[int, tuple[int, bytes]] = {}
        self.trimmed = 1
        self._open()

    def _open(self) -> None:
        self._path = self.folder / f"{self._turn}"
        self.log = FileLog(
            self._path,
            durability=self._durability,
            segment_bytes=SEGMENT_BYTES,
            segment_count=3,
        )
        self._epoch = self.log.tail.epoch + 1

    def append(self, sizes: list[int]) -> None:
        number = self.log.tail.number
        flying: list[tuple[int, bytes, Future[int]]] = []
        for size in sizes:
            payload = b"%d " % number * (size // 8)
            future = self.log.append(LogRecord(self._epoch, 1, number + 1, (payload,)))
            # A refusal is there at once, and its number is used by the next append.
            if future.done() and isinstance(future.exception(), StoreFull):
                continue
            number += 1
            flying.append((number, payload, future))
        for expected, payload, future in flying:
            assert future.result() == expected
            self.records[expected] = self._epoch, payload

    def trim(self, kept: int) -> None:
        self.log.trim(self.log.end - kept)
        self.trimmed = max(self.trimmed, self.log.start)

    def reopen(self, _: int) -> None:
        self.log.close()
        self._open()

    def crash(self, _: int) -> None:
        """Continue with a copy of the files, which no owner has closed."""
        before, self._turn = self._path, self._turn + 1
        copy = self.folder / f"{self._turn}"
        while True:
            try:
                shutil.copytree(before, copy)
            except shutil.Error:  # the log has renamed a segment meanwhile
                shutil.rmtree(copy)
            else:
                break
        self.log.close()
        shutil.rmtree(before)
        self._open()

    def check(self) -> None:
        found = dict(self.log.read(self.log.start))
        assert self.log.start <= self.trimmed
        last = max(self.records, default=0)
        assert self.log.end == last + 1
        assert list(found) == list(range(self.log.start, last + 1))
        for number, record in found.items():
            assert (record.epoch, record.payload) == self.records[number]


@settings(max_examples=150)
@given(STEPS, st.sampled_from(["fsync", "interval"]))
def test_log_matches_a_list(steps: list[tuple[str, object]], durability: Durability) -> None:
    trial = Trial(durability)
    try:
        for name, value in steps:
            getattr(trial, name)(value)
            trial.check()
    finally:
        trial.log.close()
        shutil.rmtree(trial.folder)
