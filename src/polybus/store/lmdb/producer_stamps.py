"""Producers and the check of stamps, by the table in `polybus.model.stamp`.

The results of the last commits are a ring of `kept` slots, so that a stamped commit costs
one write and no deletion. The last counter of a producer is the highest of its ring, or
that of its record if it is higher.
"""

from __future__ import annotations

from polybus.errors import Fenced, OutOfSequence, Stale, UnknownProducer
from polybus.model.commit import CommitResult
from polybus.model.stamp import ProducerEpoch, ProducerOptions, Stamp
from polybus.store.lmdb import store_keys, stored_values
from polybus.store.lmdb.writer_state import CachedProducer, WriterState


def open_producer(writer: WriterState, name: str, options: ProducerOptions) -> ProducerEpoch:
    producer = writer.cache.producer(name)
    if producer is None:
        producer = CachedProducer(
            writer.next_number("producer"), 0, 0, options.dense, options.kept_results
        )
    elif producer.kept != options.kept_results:
        _resize(writer, producer, options.kept_results)
    # Each opening fences the stamps of the epoch before.
    producer.epoch += 1
    producer.dense = options.dense
    writer.cache.producers[name] = producer
    raw = stored_values.PRODUCER.pack(
        producer.number, producer.epoch, producer.counter, producer.dense, producer.kept
    )
    writer.batch.put(store_keys.producer(name.encode()), raw)
    return ProducerEpoch(producer.epoch, producer.counter)


def look_up(writer: WriterState, name: str) -> ProducerEpoch | None:
    producer = writer.cache.producer(name)
    return ProducerEpoch(producer.epoch, producer.counter) if producer else None


def close_producer(writer: WriterState, name: str, epoch: int) -> None:
    producer = _of_epoch(writer, name, epoch)
    writer.cache.producers[name] = None
    writer.batch.delete(store_keys.producer(name.encode()))
    for slot in range(min(producer.slots, producer.kept)):
        writer.batch.delete(store_keys.result(producer.number, slot))


def find_producer(writer: WriterState, stamp: Stamp) -> CachedProducer:
    """Return the producer of a stamp. Raises `Fenced` if its epoch differs."""
    # The fast path of every stamped commit: no function call, no read.
    producer = writer.cache.producers.get(stamp.producer)
    if producer is not None and producer.epoch == stamp.epoch:
        return producer
    return _of_epoch(writer, stamp.producer, stamp.epoch)


def check_stamp(producer: CachedProducer, stamp: Stamp) -> CommitResult | None:
    """Return the first result if the stamp was used before, None if it may be used now."""
    # The next counter is by far the most frequent case, for dense producers and others.
    if stamp.counter == producer.counter + 1:
        return None
    if stamp.counter <= producer.counter:
        for raw in producer.results.values():
            if stored_values.counter_of(raw) == stamp.counter:
                counter, digest, first = stored_values.read_result(raw)
                # The same counter for another request is an error of the producer, not a repeat.
                if digest != stamp.digest:
                    raise Stale(
                        f"producer {stamp.producer!r} used counter {counter} for another request"
                    )
                return CommitResult(first.spans, first.timestamp_ns, (), first.note, True)
        raise Stale(f"the result of counter {stamp.counter} of producer {stamp.producer!r} expired")
    if producer.dense:
        raise OutOfSequence(
            f"counter of producer {stamp.producer!r} must be {producer.counter + 1}, "
            f"got {stamp.counter}"
        )
    return None


def record_result(
    writer: WriterState, producer: CachedProducer, stamp: Stamp, committed: CommitResult
) -> None:
    """Store the result of a stamp that `check_stamp` allowed."""
    _, _, counter, digest = stamp
    # The oldest result is overwritten.
    slot = producer.slots % producer.kept
    raw = stored_values.encode_result(counter, digest, committed)
    writer.batch.put(store_keys.result(producer.number, slot), raw)
    producer.slots += 1
    if counter > producer.counter:
        producer.counter = counter
    producer.results[slot] = raw


def _of_epoch(writer: WriterState, name: str, epoch: int) -> CachedProducer:
    producer = writer.cache.producer(name)
    if producer is None:
        raise UnknownProducer(f"unknown producer {name!r}; open it first")
    if epoch != producer.epoch:
        raise Fenced(f"producer {name!r} has epoch {producer.epoch}, the request has {epoch}")
    return producer


def _resize(writer: WriterState, producer: CachedProducer, kept: int) -> None:
    """Rebuild the ring with the newest results that fit."""
    for slot in range(min(producer.slots, producer.kept)):
        writer.batch.delete(store_keys.result(producer.number, slot))
    # Slots of a ring of another size have other positions, so all results are written again.
    newest = sorted(producer.results.values(), key=stored_values.counter_of)[-kept:]
    producer.results = dict(enumerate(newest))
    for slot, raw in producer.results.items():
        writer.batch.put(store_keys.result(producer.number, slot), raw)
    producer.kept, producer.slots = kept, len(newest)
