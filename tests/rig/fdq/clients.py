"""The producer and consumer processes of a round.

They work until SIGTERM and then end cleanly, unless a kill or a handler ends the process. Their
operations are in their journals.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

from polybus import fdq
from polybus.errors import Fenced, PolybusError, Unavailable, UsageError
from polybus.native import Client, ClientOptions
from polybus.native import bus_client as buses
from tests.rig.fdq.history import FAILED, LATE, OK, PRODUCE, RUN, Message
from tests.rig.fdq.journal import UNKNOWN, Journal
from tests.rig.fdq.message_plan import (
    CALM,
    DEADLY,
    DOUBTED,
    EXIT,
    FLAKY,
    POISON,
    SLOW,
    TRANSACTIONAL,
    Sender,
    plan_of,
)
from tests.rig.fdq.recorded_bus import RecordedBus
from tests.rig.fdq.snapshot import output_body
from tests.rig.fork_server import die_with_parent

TOPIC = "orders"
OUTPUT = "orders.moved"
GROUP = "billing"
EXIT_CODE = 42  # of a process that its handler has ended
MOST_OUTPUTS = 3
MOST_IN_FLIGHT = 32
LOOK_S = 0.05
MAX_DELAY_S = 0.5
TOO_LONG_A_KEY = "k" * 2000
FORESEEN = (UsageError, Unavailable, Fenced)  # by producers
PATIENT = ClientOptions(first_backoff_s=0.01, last_backoff_s=0.2, connect_timeout_s=60.0)


@dataclass(frozen=True)
class Orders:
    """The settings of a child. Times are short, because rounds are."""

    url: str
    name: str
    folder: str
    seed: int = 0
    executors: int = 2
    batch: bool = False  # requires plain messages only
    heartbeat_s: float = 0.2
    dead_s: float = 0.8
    handler_timeout_s: float = 1.0
    backoff_s: float = 0.02
    max_deliver: int = 4
    work_s: float = 0.002  # maximum run time of a handler
    keys: int = 12
    most_messages: int = 0  # messages of a producer; 0: until SIGTERM
    pause_s: float = 0.03  # maximum pause between two calls of a producer
    mix: Mapping[str, int] = field(default_factory=lambda: CALM)

    @property
    def who(self) -> str:
        """Its name. Several processes may use one name, one after the other."""
        return self.name.partition(".")[0]

    @property
    def journal(self) -> Path:
        return Path(self.folder, f"{self.name}.journal")

    @property
    def log(self) -> Path:
        return Path(self.folder, f"{self.name}.log")


def begin(orders: Orders) -> Event:
    """Set up the process: end with its parent, report errors, handle SIGTERM."""
    die_with_parent()
    log = os.open(orders.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Planned failures of handlers would flood the log.
    logging.getLogger("polybus.fdq").setLevel(logging.ERROR)
    ending = Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return ending


def record(journal: Journal) -> Callable[[int], int]:
    """Make every later bus of this process write its requests and responses to the journal.

    Returns a function that maps a shard to the epoch under which it was last assigned.
    """
    epochs: dict[int, int] = {}

    def connect(url: str | None = None, options: ClientOptions | None = None) -> Any:
        assert url is not None
        return RecordedBus(Client(url, PATIENT), journal, epochs)

    buses.connect = connect
    return epochs.__getitem__


# --- producers


def produce(orders: Orders) -> None:
    ending = begin(orders)
    record(journal := Journal(orders.journal))
    with fdq.Producer(orders.url, orders.who) as producer:
        Producing(orders, producer, journal).go_on(ending)
    journal.note("closed")


class Producing:
    """Produce single messages and batches, with and without waiting, and some invalid ones."""

    def __init__(self, orders: Orders, producer: fdq.Producer, journal: Journal) -> None:
        self._orders = orders
        self._producer = producer
        self._journal = journal
        self._random = Random(orders.seed)
        self._sender = Sender(orders.name, self._random, orders.keys, orders.mix)
        self._room = threading.Semaphore(MOST_IN_FLIGHT)
        self._sent = 0
        self._is_fenced = False
        self._surprise: BaseException | None = None

    def go_on(self, ending: Event) -> None:
        while not ending.wait(self._random.uniform(0, self._orders.pause_s)):
            if self._surprise is not None:
                raise self._surprise
            chance = self._random.random()
            if chance < 0.02:
                self._be_refused()
            elif chance < 0.1:
                self._send_delayed()
            elif chance < 0.5:
                self._send_one()
            else:
                self._send_batch()
            if self._is_fenced or 0 < self._orders.most_messages <= self._sent:
                return

    def _begin(self, messages: list[Message]) -> int:
        self._sent += len(messages)
        return self._journal.begin(PRODUCE, producer=self._orders.name, messages=messages)

    def _send_one(self) -> None:
        message = self._sender.message()
        self._room.acquire()
        number = self._begin([message])
        told = self._producer.produce_nowait(TOPIC, message.key, message.body.encode())
        told.add_done_callback(lambda future: self._told(number, future))

    def _told(self, number: int, future: Future[Any]) -> None:
        error = future.exception()
        self._end(number, error, None if error else future.result())
        self._room.release()

    def _send_batch(self) -> None:
        self._send_all([self._sender.message() for _ in range(self._random.randint(1, 8))])

    def _send_delayed(self) -> None:
        """Each message has a key of its own, because its place in a key's order is not known."""
        delay_s = self._random.uniform(0, MAX_DELAY_S)
        not_before_ns = time.time_ns() + int(delay_s * 1e9)
        messages = [
            one._replace(key=one.key and f"late {one.body}", not_before_ns=not_before_ns)
            for one in (self._sender.message() for _ in range(self._random.randint(1, 4)))
        ]
        self._send_all(messages, delay_s=delay_s)

    def _be_refused(self) -> None:
        """One key is too long, so no message of the batch may be visible."""
        messages = [self._sender.message() for _ in range(3)]
        messages[1] = messages[1]._replace(key=TOO_LONG_A_KEY)
        self._send_all(messages)

    def _send_all(self, messages: list[Message], delay_s: float | None = None) -> None:
        number = self._begin(messages)
        requests = [fdq.MessageRequest(one.key, one.body.encode()) for one in messages]
        try:
            told = self._producer.produce_batch(TOPIC, requests, delay_s=delay_s)
        except PolybusError as error:
            self._end(number, error)
        else:
            self._end(number, None, told)

    def _end(self, number: int, error: BaseException | None, told: Any = None) -> None:
        """It may have been stored before it was fenced, so its outcome is unknown."""
        sure = isinstance(error, UsageError)
        self._is_fenced = self._is_fenced or isinstance(error, Fenced)
        outcome = OK if error is None else FAILED if sure else UNKNOWN
        duplicate = told is not None and told.duplicate
        self._journal.end(number, outcome, duplicate=duplicate, error=error and repr(error))
        if error is not None and not isinstance(error, FORESEEN):
            self._surprise = error


# --- consumers


def consume(orders: Orders) -> None:
    ending = begin(orders)
    recorded = record(journal := Journal(orders.journal))
    consumer = fdq.Consumer(orders.url, heartbeat_s=orders.heartbeat_s, dead_s=orders.dead_s)
    consumer.consume(
        TOPIC,
        orders.who,
        BatchHandler(journal, recorded) if orders.batch else Handler(orders, journal),
        group=GROUP,
        batch=orders.batch,
        executors=orders.executors,
        max_deliver=orders.max_deliver,
        handler_timeout_s=orders.handler_timeout_s,
        first_backoff_s=orders.backoff_s,
        last_backoff_s=4 * orders.backoff_s,
    )
    try:
        while not ending.is_set() and not consumer.wait(LOOK_S):
            pass
    except Fenced:
        journal.note("fenced")
    consumer.close()
    journal.note("closed")


class Handler:
    """Follow the plan in the body of each message, and record it."""

    def __init__(self, orders: Orders, journal: Journal) -> None:
        self._orders = orders
        self._journal = journal
        self._random = Random(orders.seed)

    def __call__(self, envelope: fdq.Envelope) -> None:
        body = envelope.message.decode()
        number = self._journal.begin(
            RUN,
            epoch=envelope.shard_epoch,
            shard=envelope.shard,
            offset=envelope.offset,
            key=envelope.shard_key,
            body=body,
            delivery=envelope.delivery,
        )
        try:
            self._act(envelope, body, number)
        except BaseException:
            self._journal.end(number, FAILED)
            raise
        late = plan_of(body) == SLOW and envelope.delivery == 1
        self._journal.end(number, LATE if late else OK)

    def _act(self, envelope: fdq.Envelope, body: str, number: int) -> None:
        plan, first = plan_of(body), envelope.delivery == 1
        time.sleep(self._random.uniform(0, self._orders.work_s))
        if plan == DEADLY or (plan == EXIT and first):
            os._exit(EXIT_CODE)
        if plan == POISON or (plan == FLAKY and first):
            raise ValueError(f"{body}: as planned")
        if plan == SLOW and first:
            time.sleep(2 * self._orders.handler_timeout_s)
        if plan in TRANSACTIONAL:
            self._move(envelope, body, f"{self._orders.name}/{number}", plan == DOUBTED and first)

    def _move(self, envelope: fdq.Envelope, body: str, run: str, doubt: bool) -> None:
        with envelope.transaction() as transaction:
            for part in range(self._random.randint(1, MOST_OUTPUTS)):
                output = output_body(body, run, part).encode()
                transaction.produce(OUTPUT, envelope.shard_key, output)
            if doubt:
                raise ValueError(f"{body}: as planned")


class BatchHandler:
    """Record batches of messages without further work.

    A batch has no delivery count: any of its messages may be a redelivery.
    """

    def __init__(self, journal: Journal, epoch_of: Callable[[int], int]) -> None:
        self._journal = journal
        self._epoch_of = epoch_of

    def __call__(self, batch: Any) -> None:
        epoch = self._epoch_of(batch.column("shard")[0].as_py())
        for row in batch.to_pylist():
            number = self._journal.begin(
                RUN,
                epoch=epoch,
                shard=row["shard"],
                offset=row["offset"],
                key=row["shard_key"],
                body=row["body"].decode(),
                delivery=2,
            )
            self._journal.end(number, OK)
