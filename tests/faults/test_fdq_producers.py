"""FDQ producers under kills: of the bus, of themselves, and of an in-process bus.

Every acknowledged message is stored once, in key order. A batch is complete or absent. A
producer that was taken over while it was stopped is fenced and changes nothing.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

import pytest

from polybus import fdq
from polybus.native import ClientOptions
from tests.rig.native_bus import QUICK, NativeBus
from tests.rig.producer_kills import (
    PATIENCE_S,
    KilledProducer,
    Progress,
    check_stored_once,
    kill_bus,
)

TOPIC = "orders"
KILLS, MAX_KILLS, SOAK_KILLS = 4, 40, 200
NAMES = (None, None, "importer", "exporter")
KEYS = 5
MAX_ANSWERS = 400  # between a start and the next kill
LIVES = 4


# --- the bus is killed


class FdqWriter(KilledProducer):
    """Produces numbers under a few keys, one by one and in batches."""

    max_unanswered = 200

    def __init__(self, bus: NativeBus, number: int, progress: Progress) -> None:
        self._batches = 0
        super().__init__(bus, number, progress)

    def open(self) -> fdq.Producer:
        options = ClientOptions(**QUICK)
        return fdq.Producer(self.bus.url, NAMES[self.number], options=options)

    def produce(self, producer: fdq.Producer) -> Future[Any]:
        if self.choices.random() < 0.9:
            return producer.produce_nowait(TOPIC, *self._next_message(0))
        self._batches += 1
        count = self.choices.randint(2, 20)
        return producer.produce_batch_nowait(
            TOPIC, [self._next_message(self._batches) for _ in range(count)]
        )

    def _next_message(self, batch: int) -> tuple[str, bytes]:
        """Return the key, and as the body: writer, number, batch (0 if single)."""
        number, self.sent = self.sent, self.sent + 1
        return f"{self.number}-{number % KEYS}", b"%d %d %d" % (self.number, number, batch)


def count_duplicates(kills: int) -> int:
    """Kill the bus, check the topic, and return how many messages were stored unanswered."""
    with NativeBus() as bus:
        producers = kill_bus(
            bus,
            lambda progress: [FdqWriter(bus, number, progress) for number in range(len(NAMES))],
            kills,
            MAX_KILLS,
            MAX_ANSWERS,
        )
        by_key: dict[str | None, list[int]] = {}
        commit_times: dict[tuple[int, int], set[int]] = {}
        for envelope in fdq.replay(bus.url, TOPIC):
            writer, number, batch = map(int, envelope.message.split())
            by_key.setdefault(envelope.shard_key, []).append(number)
            if batch:
                commit_times.setdefault((writer, batch), set()).add(envelope.timestamp_ns)
        for producer in producers:
            for at in range(KEYS):
                key = f"{producer.number}-{at}"
                check_stored_once(by_key.get(key, []), range(at, producer.sent, KEYS), f"key {key}")
        torn = {batch for batch, times in commit_times.items() if len(times) > 1}
        assert not torn, f"batches that were stored in several commits: {torn}"
        return sum(producer.duplicates for producer in producers)


@pytest.mark.sabotage("stamps-off", expects=r"[1-9]\d* twice")
def test_producers_survive_kills_of_the_bus() -> None:
    assert count_duplicates(KILLS), "no kill fell between a commit and its answer"


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_producers_survive_hundreds_of_kills() -> None:
    assert count_duplicates(SOAK_KILLS)


# --- a named producer is killed

# Continues at the end of the topic: older producers of the name are fenced.
PROGRAM = """
import sys
from polybus import errors, fdq

url, topic = sys.argv[1:]
with fdq.Producer(url, "importer") as producer:
    try:
        seen = [int(one.message) for one in fdq.replay(url, topic)]
    except errors.DoesNotExist:
        seen = []
    next_number = max(seen, default=-1) + 1
    print("begins", producer.epoch, next_number, flush=True)
    while True:
        batch = [(f"k{n % 7}", b"%d" % n) for n in range(next_number, next_number + 10)]
        try:
            producer.produce_batch(topic, batch)
        except errors.Fenced:
            print("fenced", flush=True)
            break
        next_number += 10
        print("stored", next_number, flush=True)
"""


class Child:
    def __init__(self, url: str) -> None:
        command = [sys.executable, "-c", PROGRAM, url, TOPIC]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._out: IO[str] = self._process.stdout
        _, epoch, begins = self.line("begins")
        self.epoch, self.begins = int(epoch), int(begins)
        self.stored = self.begins

    def line(self, verb: str) -> list[str]:
        words = self._out.readline().split()
        assert words, "the producer has ended"
        assert words[0] == verb, words
        return words

    def store_some(self, count: int) -> None:
        for _ in range(count):
            self.stored = int(self.line("stored")[1])

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def last_word(self) -> str:
        """Return its final output; if it continues, the output after that."""
        for _ in range(20):
            words = self._out.readline().split()
            if not words or words[0] != "stored":
                self.wait()
                return words[0] if words else "nothing"
        self._process.kill()
        self.wait()
        return "stored"

    def kill(self) -> None:
        """Kill it, then read the output that it wrote before."""
        self._process.kill()
        for words in map(str.split, self._out):
            if words and words[0] == "stored" and len(words) == 2:
                self.stored = max(self.stored, int(words[1]))
        self.wait()

    def wait(self) -> None:
        self._process.wait(PATIENCE_S)
        self._out.close()


def numbers(url: str) -> list[int]:
    return [int(one.message) for one in fdq.replay(url, TOPIC)]


def check_numbers(found: list[int], acked: int) -> None:
    assert len(found) >= acked, f"acknowledged message is missing: {acked - len(found)} of {acked}"
    assert len(found) == len(set(found)), "a message is stored twice"
    assert sorted(found) == list(range(len(found))), "a message before the last is missing"
    assert len(found) % 10 == 0, "a batch is stored in part"


def test_named_producer_over_many_processes() -> None:
    with NativeBus() as bus:
        choices = random.Random(3)
        epochs, stored = [], 0
        for _ in range(LIVES):
            child = Child(bus.url)
            assert child.begins >= stored, "acknowledged message is missing"
            child.store_some(choices.randint(1, 20))
            child.kill()
            epochs.append(child.epoch)
            stored = child.stored
        assert epochs == list(range(1, LIVES + 1))
        check_numbers(numbers(bus.url), stored)


@pytest.mark.sabotage("epochs-off", expects="the older producer was not fenced: stored")
def test_producer_taken_over_while_stopped_is_fenced() -> None:
    with NativeBus() as bus:
        older = Child(bus.url)
        older.store_some(3)
        older.signal(signal.SIGSTOP)
        newer = Child(bus.url)
        newer.store_some(5)
        older.signal(signal.SIGCONT)
        last = older.last_word()
        newer.kill()
        assert last == "fenced", f"the older producer was not fenced: {last}"
        check_numbers(numbers(bus.url), newer.stored)


# --- an in-process bus is killed


@pytest.mark.sabotage("keep-nothing", expects="acknowledged message is missing")
def test_in_process_bus_is_killed_with_its_process(tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path / 'store'}"
    choices = random.Random(5)
    stored = 0
    for life in range(1, LIVES + 1):
        child = Child(url)
        assert child.begins >= stored, f"acknowledged message is missing: {stored - child.begins}"
        assert child.epoch == life, "the producer's name was forgotten"
        child.store_some(choices.randint(1, 30))
        child.kill()
        stored = child.stored
    check_numbers(numbers(url), stored)
