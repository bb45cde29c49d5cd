"""Stamps on JetStream: a producer's head has its epoch, its counter and its kept results.

Each kept result has a message of its own, in one of a few slots. Rewriting all results with
every commit would be expensive, and 1024 results with notes and spans do not fit into one
message.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from polybus.errors import Fenced, OutOfSequence, Stale, UnknownProducer
from polybus.model.commit import CommitResult, Span
from polybus.model.stamp import ProducerEpoch, ProducerOptions, Stamp
from tests.spikes.jetstream import subjects
from tests.spikes.jetstream.draft import Draft


def open_producer(draft: Draft, name: str, habits: ProducerOptions) -> ProducerEpoch:
    subject = subjects.producer(name)
    head = draft.head(subject).json() or {"epoch": 0, "last": 0, "kept": []}
    head["epoch"] += 1
    head["dense"], head["most"] = habits
    head["kept"] = head["kept"][-habits.kept_results :]
    draft.set_json(subject, head)
    return ProducerEpoch(head["epoch"], head["last"])


def look_up(draft: Draft, name: str) -> ProducerEpoch | None:
    head = draft.head(subjects.producer(name)).json()
    return ProducerEpoch(head["epoch"], head["last"]) if head else None


def close_producer(draft: Draft, name: str, epoch: int) -> None:
    _of_epoch(draft, name, epoch)
    draft.set(subjects.producer(name), None)


def _of_epoch(draft: Draft, name: str, epoch: int) -> dict[str, Any]:
    head: dict[str, Any] | None = draft.head(subjects.producer(name)).json()
    if head is None:
        raise UnknownProducer(name)
    if epoch != head["epoch"]:
        raise Fenced(f"producer {name!r} has epoch {head['epoch']}, not {epoch}")
    return head


def earlier_result(draft: Draft, stamp: Stamp) -> CommitResult | None:
    """Return the first result of a repeat, or None if the stamp is new. Raises otherwise."""
    head = _of_epoch(draft, stamp.producer, stamp.epoch)
    if stamp.counter <= head["last"]:
        return _kept_result(draft, stamp, dict(head["kept"]).get(stamp.counter))
    if head["dense"] and stamp.counter != head["last"] + 1:
        raise OutOfSequence(f"producer {stamp.producer!r}: {stamp.counter} after {head['last']}")
    return None


def _kept_result(draft: Draft, stamp: Stamp, slot: int | None) -> CommitResult:
    kept = None if slot is None else draft.head(subjects.result(stamp.producer, slot)).json()
    if kept is None or kept["counter"] != stamp.counter or kept["digest"] != stamp.digest.hex():
        raise Stale(f"counter {stamp.counter} of producer {stamp.producer!r} was used")
    spans = tuple(Span(*span) for span in kept["spans"])
    note = bytes.fromhex(kept["note"])
    return CommitResult(spans, kept["timestamp_ns"], note=note, duplicate=True)


def use_up(draft: Draft, stamp: Stamp, result: CommitResult) -> None:
    """Store the result of a stamp. `earlier_result` must have returned None for it."""
    subject = subjects.producer(stamp.producer)
    head = draft.head(subject).json()
    kept = head["kept"][max(0, len(head["kept"]) + 1 - head["most"]) :]
    taken = {slot for _, slot in kept}
    free = next(slot for slot in count() if slot not in taken)
    result_head = {
        "counter": stamp.counter,
        "digest": stamp.digest.hex(),
        "note": result.note.hex(),
        "spans": result.spans,
        "timestamp_ns": result.timestamp_ns,
    }
    draft.set_json(subjects.result(stamp.producer, free), result_head)
    head |= {"last": stamp.counter, "kept": [*kept, (stamp.counter, free)]}
    draft.set_json(subject, head)
