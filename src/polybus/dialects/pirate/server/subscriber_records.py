"""Stored state of subscribers: four families of records, and producers of the store.

    pirate/subscription/TTTTTTTT CLIENT   a subscription: the account it is charged to
    pirate/last/TTTTTTTT CLIENT           LAST, the position of the reader, 8 bytes big-endian
    pirate/counter/CLIENT                 the client's newest epoch, and the random numbers of
                                          its last HELLOs, 8 bytes each, the newest last
    pirate/account/CLIENT                 the account that the client is charged to

T is the topic's number in hex. CLIENT is the id's bytes, to the end of the key. The counter and
its answer are a producer of the store named `pirate:` and the id in hex, whose counters may
have gaps and which keeps one result.

The note of a stamp is the stored answer, so that a repeated request gets the first answer:

    (none)          a message was put: its id is in the commit's result
    N number        the answered number: LAST of a SUB, 0 or 1 of an UNSUB
    E code 0 text   the refusal that used up the counter
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from heapq import nsmallest
from struct import Struct, unpack
from typing import Any, Final, NamedTuple

from polybus.dialects.pirate.codec import ClientRequest
from polybus.errors import Damaged, PolybusError, error_from_code
from polybus.model.commit import Commit, CommitResult, RecordChange, StoredRecord
from polybus.model.stamp import ProducerOptions
from polybus.model.topic import Bounds, Topic
from polybus.store.contract import Store

SUBSCRIPTIONS: Final = b"pirate/subscription/"
LASTS: Final = b"pirate/last/"
COUNTERS: Final = b"pirate/counter/"
ACCOUNTS: Final = b"pirate/account/"
PRODUCERS: Final = "pirate:"
PRODUCER_OPTIONS: Final = ProducerOptions(dense=False, kept_results=1)

# A delayed HELLO is recognised as a copy among this many starts of a client.
MAX_HELLO_NUMBERS: Final = 1024
MAX_CHANGES_PER_COMMIT: Final = 600  # the store takes 900 records per commit
MAX_TEXT_BYTES: Final = 900  # of a refusal; with its code it fits into a note
MAX_LISTED: Final = 1024  # the subscribers with the largest lag
DIGEST_BYTES: Final = 16
JOINED_BYTES: Final = 4096  # copying this much costs less than one more call

_NUMBER: Final = Struct(">Q")
_TOPIC_DIGITS: Final = 8
_NUMBER_MARK: Final = b"N"
_ERROR_MARK: Final = b"E"


# --- clients


class HelloHistory(NamedTuple):
    """The numbers of the last HELLOs. Each new number increases the epoch by one."""

    newest: int = 0
    numbers: tuple[int, ...] = ()

    def epoch_of(self, number: int) -> int | None:
        if number not in self.numbers:
            return None
        return self.newest - (len(self.numbers) - 1 - self.numbers.index(number))

    def with_number(self, number: int) -> HelloHistory:
        return HelloHistory(self.newest + 1, (*self.numbers, number)[-MAX_HELLO_NUMBERS:])

    def encode(self) -> bytes:
        return b"".join([_NUMBER.pack(number) for number in (self.newest, *self.numbers)])

    @classmethod
    def decode(cls, raw: bytes) -> HelloHistory:
        if len(raw) < _NUMBER.size or len(raw) % _NUMBER.size:
            raise Damaged("damaged record of a pirate client")
        newest, *numbers = unpack(f">{len(raw) // _NUMBER.size}Q", raw)
        return cls(newest, tuple(numbers))


def producer_name(client: bytes) -> str:
    return PRODUCERS + client.hex()


def counter_key(client: bytes) -> bytes:
    return COUNTERS + client


def account_key(client: bytes) -> bytes:
    return ACCOUNTS + client


def encode_account(account: str) -> bytes:
    return account.encode("utf-8", "backslashreplace")


def read_account(store: Store, client: bytes) -> str:
    """Return the account of a client; empty if it is older than the record. Blocks."""
    record = store.get(account_key(client))
    return record.value.decode("utf-8", "replace") if record else ""


# --- subscriptions


class SubscriptionKey(NamedTuple):
    topic: int
    client: bytes


def topic_prefix(family: bytes, topic: int) -> bytes:
    return family + b"%08x" % topic


def record_key(family: bytes, key: SubscriptionKey) -> bytes:
    return topic_prefix(family, key.topic) + key.client


def read_key(family: bytes, raw: bytes) -> SubscriptionKey:
    """Return topic and client of a key. Raises `Damaged`."""
    start = len(family)
    number = raw[start : start + _TOPIC_DIGITS]
    try:
        return SubscriptionKey(int(number, 16), raw[start + _TOPIC_DIGITS :])
    except ValueError:
        raise Damaged(f"invalid key of a subscriber: {raw!r}") from None


def last_change(key: SubscriptionKey, last: int) -> RecordChange:
    return RecordChange(record_key(LASTS, key), _NUMBER.pack(last))


def unsubscribe_changes(key: SubscriptionKey) -> tuple[RecordChange, ...]:
    return (
        RecordChange(record_key(SUBSCRIPTIONS, key), None),
        RecordChange(record_key(LASTS, key), None),
    )


def read_last(raw: bytes) -> int:
    if len(raw) != _NUMBER.size:
        raise Damaged("damaged record of a subscriber's position")
    return int.from_bytes(raw)


def scan(store: Store, prefix: bytes) -> Iterator[StoredRecord]:
    after = b""
    while page := store.scan(prefix, after):
        yield from page
        after = page[-1].key


def remove_topic_records(store: Store, topic: int) -> None:
    """Remove all subscription records of a topic. Blocks."""
    for family in (LASTS, SUBSCRIPTIONS):
        while page := store.scan(topic_prefix(family, topic), limit=MAX_CHANGES_PER_COMMIT):
            changes = tuple(RecordChange(record.key, None) for record in page)
            store.commit(Commit(changes=changes)).result()


def read_subscriber_lags(store: Store, topic: Topic, bounds: Bounds) -> list[dict[str, Any]]:
    """Return id (hex), LAST and lag of each subscriber, the largest lag first."""
    lasts = (
        (read_last(record.value), read_key(LASTS, record.key).client.hex())
        for record in scan(store, topic_prefix(LASTS, topic.number))
    )
    newest = bounds.next_id - 1
    return [
        {"id": client, "last": last, "lag": max(0, newest - last)}
        for last, client in nsmallest(MAX_LISTED, lasts)
    ]


# --- stamps and stored answers

STALE: Final = "the counter was already used, for another request or too long ago"


def digest_head(op: bytes, topic: bytes) -> bytes:
    return b"%b\0%b\0" % (op, topic)


def request_digest(request: ClientRequest, body: bytes = b"") -> bytes:
    """Return a digest by which the store detects two requests with the same counter."""
    head = digest_head(request.op, request.topic.encode())
    if len(body) <= JOINED_BYTES:
        return blake2b(head + body, digest_size=DIGEST_BYTES).digest()
    digest = blake2b(head, digest_size=DIGEST_BYTES)
    digest.update(body)
    return digest.digest()


def encode_number(number: int) -> bytes:
    return _NUMBER_MARK + number.to_bytes(8)


def encode_refusal(error: PolybusError) -> bytes:
    text = str(error).encode("utf-8", "backslashreplace")[:MAX_TEXT_BYTES]
    return _ERROR_MARK + error.code.encode() + b"\0" + text


def decode_outcome(result: CommitResult) -> int | PolybusError:
    """Return the stored answer: a number or a refusal."""
    note = result.note
    if not note:
        return result.spans[0].first_id
    if note[:1] == _NUMBER_MARK:
        return int.from_bytes(note[1:])
    code, _, text = note[1:].partition(b"\0")
    return error_from_code(code.decode(), text.decode("utf-8", "replace"))
