"""The topic that is scanned: orders as JSON with the customer as key, in batches of 10,000."""

import random
from collections.abc import Iterator

from polybus.native import Client

SIZE = 128
BATCH_MESSAGES = 10_000
CUSTOMERS = 1000
SHARDS = 4


def fill(url: str, topic: str, messages: int) -> None:
    with Client(url) as client:
        client.create_topic(topic, SHARDS)
        add(client, topic, messages)


def add(client: Client, topic: str, messages: int) -> None:
    with client.producer() as producer:
        for bodies, keys in _batches(messages):
            producer.produce(topic, bodies, keys)
        producer.flush()


def _batches(messages: int) -> Iterator[tuple[list[bytes], list[str]]]:
    chance = random.Random(messages)
    for first in range(0, messages, BATCH_MESSAGES):
        numbers = range(first, min(first + BATCH_MESSAGES, messages))
        customers = [chance.randrange(CUSTOMERS) for _ in numbers]
        yield (
            [_order(*order, chance) for order in zip(numbers, customers, strict=True)],
            [f"customer-{customer}" for customer in customers],
        )


def _order(number: int, customer: int, chance: random.Random) -> bytes:
    """Return an order. All are different, and about half of the bytes are the same in each."""
    start = f'{{"order": {number}, "customer": {customer}, "cents": {chance.randrange(10**6)}, '
    note = chance.randbytes(SIZE // 2).hex()
    return (start + '"note": "' + note)[: SIZE - 2].encode() + b'"}'
