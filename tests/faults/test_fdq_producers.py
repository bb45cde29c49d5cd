"""FDQ producers under kills: of the bus, of themselves, and of an in-process bus.

Every acknowledged message is stored once, in key order. A batch is complete or absent. A
producer that was taken over while it was stopped is fenced and changes nothing.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from threading import Condition, Thread
from typing import IO, Any

import pytest

from polybus import fdq
from polybus.native import ClientOptions
from tests.rig.native_bus import QUICK, NativeBus

TOPIC = "orders"
KILLS, MOST_KILLS, SOAK_KILLS = 4, 40, 200
KEYS = 5
IN_FLIGHT = 200
MOST_ANSWERS = 400  # between a start and the next kill
PATIENCE_S = 60.0
LIVES = 4


# --- the bus is killed


class Writer:
    """Produces numbers under a few keys, alone and in batches, until it is stopped."""

    def __init__(self, url: str, number: int, name: str | None, progress: Progress) -> None:
        self._url = url
        self._name = name
        self._progress = progress
        self._choices = random.Random(number)
        self.number = number
        self.sent = 0
        self.batches = 0
        self.duplicates = 0
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            options = ClientOptions(**QUICK)
            with fdq.Producer(self._url, self._name, options=options) as producer:
                waiting: deque[Future[Any]] = deque()
                while not self._progress.stopping:
                    future = self._step(producer)
                    future.add_done_callback(self._progress.note)
                    waiting.append(future)
                    if len(waiting) > IN_FLIGHT:
                        self._settle(waiting.popleft())
                while waiting:
                    self._settle(waiting.popleft())
        except BaseException as error:
            self._progress.fail(error)

    def _step(self, producer: fdq.Producer) -> Future[Any]:
        if self._choices.random() < 0.9:
            key, body = self._message(0)
            return producer.produce(TOPIC, key, body, wait=False)
        self.batches += 1
        count = self._choices.randint(2, 20)
        batch = [self._message(self.batches) for _ in range(count)]
        return producer.produce_batch(TOPIC, batch, wait=False)

    def _message(self, batch: int) -> tuple[str, bytes]:
        """Return the key, and: writer, number, batch (0 if single)."""
        number, self.sent = self.sent, self.sent + 1
        return f"{self.number}-{number % KEYS}", b"%d %d %d" % (self.number, number, batch)

    def _settle(self, future: Future[Any]) -> None:
        self.duplicates += future.result(PATIENCE_S).duplicate


class Progress:
    """Return the number of acknowledged messages of all writers."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._answered = 0
        self.stopping = False
        self.failure: BaseException | None = None

    def note(self, future: Future[Any]) -> None:
        with self._changed:
            self._answered += 1
            self.failure = self.failure or future.exception()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def wait_for_more(self, count: int) -> None:
        with self._changed:
            wanted = self._answered + count
            done = self._changed.wait_for(
                lambda: self._answered >= wanted or self.failure, PATIENCE_S
            )
            assert self.failure is None, f"a producer failed: {self.failure!r}"
            assert done, "the producers do not go on"


def check(url: str, writers: list[Writer]) -> None:
    by_key: dict[str | None, list[int]] = {}
    times: dict[tuple[int, int], set[int]] = {}
    for one in fdq.replay(url, TOPIC):
        who, number, batch = map(int, one.message.split())
        by_key.setdefault(one.shard_key, []).append(number)
        if batch:
            times.setdefault((who, batch), set()).add(one.timestamp_ns)
    for writer in writers:
        for key in range(KEYS):
            got = by_key.get(f"{writer.number}-{key}", [])
            expected = list(range(key, writer.sent, KEYS))
            twice = len(got) - len(set(got))
            lost = set(expected) - set(got)
            assert (twice, lost) == (0, set()), f"{writer.number}: {twice} twice, {lost} lost"
            assert got == expected, f"{writer.number}: key {key} is out of order"
    torn = {batch for batch, seen in times.items() if len(seen) > 1}
    assert not torn, f"batches that did not come in one step: {torn}"


def kill_the_bus(kills: int) -> int:
    """Return the number of stored messages without an acknowledgement."""
    choices = random.Random(11)
    with NativeBus() as bus:
        progress = Progress()
        names = [None, None, "importer", "exporter"]
        writers = [Writer(bus.url, n, name, progress) for n, name in enumerate(names)]
        done = 0
        while done < kills or (done < MOST_KILLS and not any(one.duplicates for one in writers)):
            progress.wait_for_more(choices.randint(1, MOST_ANSWERS))
            bus.kill()
            bus.start()
            done += 1
        progress.stopping = True
        for writer in writers:
            writer.thread.join(PATIENCE_S)
            assert not writer.thread.is_alive(), "a producer does not end"
        assert progress.failure is None, f"a producer failed: {progress.failure!r}"
        check(bus.url, writers)
        return sum(writer.duplicates for writer in writers)


@pytest.mark.sabotage("stamps-off", expects=r"[1-9]\d* twice")
def test_producers_survive_kills_of_the_bus() -> None:
    assert kill_the_bus(KILLS), "no kill fell between a commit and its answer"


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_producers_survive_hundreds_of_kills() -> None:
    assert kill_the_bus(SOAK_KILLS)


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

    def rest(self) -> list[str]:
        """Return its remaining output, until it ends."""
        return self._out.read().splitlines()

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
        """Return the output before the kill."""
        self._process.kill()
        for words in map(str.split, self.rest()):
            if words and words[0] == "stored" and len(words) == 2:
                self.stored = max(self.stored, int(words[1]))
        self.wait()

    def wait(self) -> None:
        self._process.wait(PATIENCE_S)
        self._out.close()


def numbers(url: str) -> list[int]:
    return [int(one.message) for one in fdq.replay(url, TOPIC)]


def check_numbers(found: list[int], acked: int) -> None:
    assert len(found) == len(set(found)), "something is there twice"
    assert sorted(found) == list(range(len(found))), "something is missing"
    assert len(found) % 10 == 0, "a part of a batch is there"
    assert len(found) >= acked, "something was answered, and is not there"


def test_named_producer_over_many_processes() -> None:
    with NativeBus() as bus:
        choices = random.Random(3)
        epochs, stored = [], 0
        for _ in range(LIVES):
            child = Child(bus.url)
            assert child.begins >= stored
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


@pytest.mark.sabotage("keep-nothing", expects="something was answered, and is not there")
def test_in_process_bus_is_killed_with_its_process(tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path / 'store'}"
    choices = random.Random(5)
    stored = 0
    for life in range(1, LIVES + 1):
        child = Child(url)
        assert child.epoch == life, "the name does not go on"
        assert child.begins >= stored, "something was answered, and is not there"
        child.store_some(choices.randint(1, 30))
        child.kill()
        stored = child.stored
    check_numbers(numbers(url), stored)
