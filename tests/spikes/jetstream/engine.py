"""A spike: as much of the store's contract as shows that it fits JetStream. Not shipped.

One thread does all the work, one batch at a time. A real engine would also merge pending
commits into one batch, cut blocks that are larger than a message may be, watch, have an
index, re-block, and use a format smaller than JSON.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from polybus.errors import NotSupported, Trimmed
from polybus.model.block import gather
from polybus.model.commit import Append, Commit, CommitResult, StoredRecord
from polybus.model.rows import Rows
from polybus.model.stamp import ProducerEpoch, ProducerOptions
from polybus.model.topic import ALL, All, Bounds, Topic
from polybus.store import request_checks
from polybus.store.contract import LEASE_S, MAX_READ_BYTES, MAX_ROWS, Listener, Store
from tests.spikes.jetstream import committing, producers, subjects, topics
from tests.spikes.jetstream.batches import Batches
from tests.spikes.jetstream.draft import Draft, head_of
from tests.spikes.jetstream.link import Link
from tests.spikes.jetstream.log import Log
from tests.spikes.jetstream.senses import Senses

T = TypeVar("T")


class JetStreamSpike(Store):
    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        wall_ns: Callable[[], int] = time.time_ns,
        clock_s: Callable[[], float] = time.monotonic,
        fresh: bool = False,
    ) -> None:
        self._senses = Senses(wall_ns, clock_s)
        self.link = Link(url, timeout_s)
        self.link.connect()
        self.link.make_stream(fresh)
        self.batches = Batches(self.link, self._senses)
        self._log = Log(self.link)
        self._work = ThreadPoolExecutor(1)

    def close(self) -> None:
        self._work.shutdown()
        self.link.close()

    # --- topics

    def create(self, name: str, shards: int, settings: Mapping[str, object]) -> Topic:
        wanted = request_checks.new_topic(name, shards, settings)
        return self._change(lambda draft: topics.create(draft, *wanted))

    def configure(self, name: str, settings: Mapping[str, object], *, add_shards: int = 0) -> Topic:
        copy, added = request_checks.topic_settings(settings), request_checks.new_shards(add_shards)
        return self._change(lambda draft: topics.configure(draft, name, copy, added))

    def topics(self) -> list[Topic]:
        tails = [
            (tail, head_of(self.link.last(tail)).json()) for tail in self.link.subjects("ns.n.*")
        ]
        found = (
            topics.topic_of(head, int(tail.rpartition(".")[2])) for tail, head in tails if head
        )
        return sorted(found, key=lambda topic: topic.name)

    def drop(self, name: str) -> None:
        number = self._change(lambda draft: topics.drop(draft, name))
        self.link.purge(subjects.log(number, "*"))  # after the commit, and at leisure

    def trim(self, topic: int, before: Mapping[int, int]) -> None:
        self._change(lambda draft: self._trim(draft, topic, before))
        for shard, offset in before.items():
            first = self._log.locate(subjects.log(topic, shard), offset, "offset")
            self.link.purge(subjects.log(topic, shard), first)

    # --- writing

    def commit(self, commit: Commit) -> Future[CommitResult]:
        return self._work.submit(self._commit, commit)

    def open_producer(self, name: str, habits: ProducerOptions) -> ProducerEpoch:
        request_checks.producer(name)
        request_checks.producer_options(habits)
        return self._change(lambda draft: producers.open_producer(draft, name, habits))

    def look_up_producer(self, name: str) -> ProducerEpoch | None:
        request_checks.producer(name)
        return self._change(lambda draft: producers.look_up(draft, name))

    def close_producer(self, name: str, epoch: int) -> None:
        self._change(lambda draft: producers.close_producer(draft, name, epoch))

    def open_stage(self, lease_s: float = LEASE_S) -> str:
        name = uuid.uuid4().hex
        head = {"state": "open", "lease_s": request_checks.lease(lease_s), "holds": {}}
        self._change(lambda draft: draft.set_json(subjects.lease(name), head))
        return name

    def stage(self, stage: str, appends: Sequence[Append]) -> Future[None]:
        def staged(draft: Draft) -> None:
            committing.stage(draft, stage, request_checks.appends(appends))

        return self._work.submit(self.batches.change, staged)

    def reroute_stage(self, stage: str) -> bool:
        raise NotSupported("the spike does not reshard")

    def staged_topics(self, stages: Sequence[str]) -> frozenset[int]:
        heads = self._look(lambda draft: [draft.head(subjects.lease(one)).json() for one in stages])
        places = [
            place for head in heads if head and head["state"] == "open" for place in head["holds"]
        ]
        return frozenset(int(place.partition(" ")[0]) for place in places)

    def renew(self, stage: str, lease_s: float = LEASE_S) -> None:
        request_checks.lease(lease_s)

        def renewed(draft: Draft) -> None:
            head = committing.open_stage(draft, stage)
            draft.set_json(subjects.lease(stage), head | {"lease_s": lease_s})

        self._change(renewed)

    def discard(self, stage: str) -> None:
        def discarded(draft: Draft) -> bool:
            head = draft.head(subjects.lease(stage)).json()
            if head is None or head["state"] != "open":
                return False
            draft.set(subjects.lease(stage), None)
            return True

        if self._change(discarded):
            self.link.purge(subjects.staged(stage, "*", "*"))

    def collect(self) -> list[str]:
        """Remove the stages whose heads have not changed for their lease, by this bus's clock."""
        found = {subject.rpartition(".")[2] for subject in self.link.subjects("ns.l.*")}
        collected = [stage for stage in found if self._collected(stage)]
        for stage in collected:
            self.link.purge(subjects.staged(stage, "*", "*"))
        return collected

    # --- reading

    def bounds(self, topic: int) -> Bounds:
        return topics.bounds_of(self._look(lambda draft: topics.tail_of(draft, topic)))

    def end(self, topic: int, shard: int | All) -> int:
        bounds = self.bounds(topic)
        return bounds.next_id if shard == ALL else bounds.shards[shard].end

    def read(
        self,
        topic: int,
        shard: int | All,
        start: int,
        end: int | None = None,
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_READ_BYTES,
    ) -> Rows:
        start, end, max_rows, max_bytes = request_checks.read(start, end, max_rows, max_bytes)
        tail = self._look(lambda draft: topics.tail_of(draft, topic))
        request_checks.shard_of(topics.topic_of(tail, topic), shard)
        bounds, log = topics.bounds_of(tail), self._log
        if shard == ALL:
            below = min(end, bounds.next_id)
            pieces = log.of_topic(topic, start, below, bounds, max_rows)
            limits: dict[str, Any] = {"from_id": start, "below_id": below}
        else:
            first, last, _ = bounds.shards[shard]
            if start < first:
                raise Trimmed(f"shard {shard} of topic {topic} starts at {first}", first)
            pieces, limits = log.of_shard(topic, shard, start, min(end, last), max_rows), {}
        return gather(pieces, max_rows=max_rows, max_bytes=max_bytes, **limits)

    def find(self, topic: int, shard: int | All, timestamp_ns: int) -> int:
        request_checks.time_ns(timestamp_ns)
        tail = self._look(lambda draft: topics.tail_of(draft, topic))
        request_checks.shard_of(topics.topic_of(tail, topic), shard)
        bounds = topics.bounds_of(tail)
        found = self._log.since(topic, shard, timestamp_ns, bounds)
        if shard == ALL:
            return bounds.next_id if found is None else found.id
        return bounds.shards[shard].end if found is None else found.offset

    def get(self, key: bytes) -> StoredRecord | None:
        head = self._look(lambda draft: draft.head(subjects.record(request_checks.key(key))))
        return None if head.body is None else StoredRecord(key, head.body, head.sequence)

    def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[StoredRecord]:
        request_checks.scan(prefix, after, limit)
        pattern = subjects.record(prefix)
        found = {*self.link.subjects(pattern), *self.link.subjects(f"{pattern}.>")}
        keys = sorted(key for key in map(subjects.key_of, found) if key > after)
        records = (self.get(key) for key in keys)
        return [record for record in records if record is not None][:limit]

    def watch(self, listener: Listener) -> Callable[[], None]:
        raise NotImplementedError("a consumer of the log's headers")

    # --- on the engine's thread

    def _change(self, plan: Callable[[Draft], T]) -> T:
        return self._work.submit(self.batches.change, plan).result()

    def _look(self, plan: Callable[[Draft], T]) -> T:
        return self._work.submit(self.batches.look, plan).result()

    def _commit(self, wanted: Commit) -> CommitResult:
        request_checks.commit(wanted)
        result, sequences = self.batches.done(lambda draft: committing.commit(draft, wanted))
        if result.duplicate:
            return result
        versions = tuple(committing.versions(wanted.changes, sequences))
        return result._replace(versions=versions)

    def _trim(self, draft: Draft, topic: int, before: Mapping[int, int]) -> None:
        tail = topics.tail_of(draft, topic)
        for shard, offset in request_checks.trims(topics.topic_of(tail, topic), before).items():
            bounds = tail["shards"][shard]
            bounds["start"] = max(bounds["start"], min(offset, bounds["end"]))
            if bounds["start"] < bounds["end"]:
                bounds["first_id"] = self._log.id_at(topic, shard, bounds["start"])
        draft.set_json(subjects.tail(topic), tail)

    def _collected(self, stage: str) -> bool:
        def collected(draft: Draft) -> bool:
            head = draft.head(subjects.lease(stage))
            value = head.json()
            if value is None or value["state"] != "open":
                return False
            if not self._senses.expired(subjects.lease(stage), head.sequence, value["lease_s"]):
                return False
            draft.set(subjects.lease(stage), None)  # unless it is renewed or published first
            return True

        return self._change(collected)
