"""Producers and their stamps, by the table in `polybus.model.stamp`.

The results of the last commits stand in a ring of `kept` slots, so that a stamped
commit costs one write and nothing to delete. The last counter is the highest of the
ring, or what the producer's record says if that is higher.
"""

from __future__ import annotations

from polybus.errors import Fenced, OutOfSequence, Stale, UnknownProducer
from polybus.model.commit import Committed
from polybus.model.stamp import Habits, Opened, Stamp
from polybus.store.lmdb import store_keys, stored_values
from polybus.store.lmdb.state_cache import Producer
from polybus.store.lmdb.writer_state import Books


def open_producer(books: Books, name: str, habits: Habits) -> Opened:
    producer = books.known.producer(name)
    if producer is None:
        producer = Producer(books.number("producer"), 0, 0, habits.dense, habits.kept_results)
    elif producer.kept != habits.kept_results:
        _resize(books, producer, habits.kept_results)
    producer.epoch += 1
    producer.dense = habits.dense
    books.known.producers[name] = producer
    _store(books, name, producer)
    return Opened(producer.epoch, producer.counter)


def look_up(books: Books, name: str) -> Opened | None:
    producer = books.known.producer(name)
    return Opened(producer.epoch, producer.counter) if producer else None


def close_producer(books: Books, name: str, epoch: int) -> None:
    producer = _of_epoch(books, name, epoch)
    books.known.producers[name] = None
    books.batch.delete(store_keys.producer(name.encode()))
    for slot in range(min(producer.slots, producer.kept)):
        books.batch.delete(store_keys.result(producer.number, slot))


def owner(books: Books, stamp: Stamp) -> Producer:
    """The producer whose stamp it is; `Fenced` if it has another epoch by now."""
    producer = books.known.producers.get(stamp.producer)
    if producer is not None and producer.epoch == stamp.epoch:
        return producer
    return _of_epoch(books, stamp.producer, stamp.epoch)


def judge(producer: Producer, stamp: Stamp) -> Committed | None:
    """The first result, if the stamp was used before; None if it may be used now."""
    if stamp.counter == producer.counter + 1:
        return None
    if stamp.counter <= producer.counter:
        return _first_result(producer, stamp)
    if producer.dense:
        raise OutOfSequence(
            f"producer {stamp.producer!r} is at {producer.counter}, not before {stamp.counter}"
        )
    return None


def use(books: Books, producer: Producer, stamp: Stamp, committed: Committed) -> None:
    """The stamp is used up, and this is its result; `judge` has allowed it."""
    _, _, counter, digest = stamp
    slot = producer.slots % producer.kept
    raw = stored_values.result(counter, digest, committed)
    books.batch.put(store_keys.result(producer.number, slot), raw)
    producer.slots += 1
    if counter > producer.counter:
        producer.counter = counter
    producer.results[slot] = raw


def _of_epoch(books: Books, name: str, epoch: int) -> Producer:
    producer = books.known.producer(name)
    if producer is None:
        raise UnknownProducer(f"nobody has opened a producer {name!r}")
    if epoch != producer.epoch:
        raise Fenced(f"producer {name!r} is at epoch {producer.epoch}, not {epoch}")
    return producer


def _first_result(producer: Producer, stamp: Stamp) -> Committed:
    for raw in producer.results.values():
        if stored_values.counter_of(raw) == stamp.counter:
            counter, digest, committed = stored_values.read_result(raw)
            if digest != stamp.digest:
                raise Stale(f"{stamp.producer!r} used {counter} for another request")
            return Committed(committed.spans, committed.timestamp_ns, (), committed.note, True)
    raise Stale(f"the result of {stamp.producer!r} {stamp.counter} is not kept any more")


def _resize(books: Books, producer: Producer, kept: int) -> None:
    """Lays the ring out anew, with as many of the newest results as it will hold."""
    for slot in range(min(producer.slots, producer.kept)):
        books.batch.delete(store_keys.result(producer.number, slot))
    newest = sorted(producer.results.values(), key=stored_values.counter_of)[-kept:]
    producer.results = dict(enumerate(newest))
    for slot, raw in producer.results.items():
        books.batch.put(store_keys.result(producer.number, slot), raw)
    producer.kept, producer.slots = kept, len(newest)


def _store(books: Books, name: str, producer: Producer) -> None:
    raw = stored_values.PRODUCER.pack(
        producer.number, producer.epoch, producer.counter, producer.dense, producer.kept
    )
    books.batch.put(store_keys.producer(name.encode()), raw)
