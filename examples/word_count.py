"""Counts words with three consumers, of which any may be killed at any time.

    python examples/word_count.py [polybus://127.0.0.1:6570] [FILE]

Lines go to one topic. Each consumer is a process of its own; it takes lines and produces
how often each word is in them, and does so in a transaction: the counts of a line, and that
it is done, are one step. So a line that was being counted when its consumer was killed is
counted by another one, and never twice.

Try it: while it runs, `kill -9` any of the processes whose numbers it prints, or all.
"""

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from polybus import fdq, native

LINES = "example.lines"
COUNTS = "example.counts"
CONSUMERS = 3


# --- a consumer


def count(line: fdq.Envelope) -> None:
    words = Counter(line.message.decode().lower().split())
    with line.transaction() as transaction:
        for word, times in words.items():
            transaction.produce(COUNTS, word, b"%d" % times)


def consume(url: str, name: str) -> None:
    # A killed consumer is detected soon; the default is five seconds.
    with fdq.Consumer(url, heartbeat_s=0.3, dead_s=1.5) as consumer:
        consumer.consume(LINES, name, count, group="counters", max_deliver=100)
        consumer.wait()


# --- the program


class Consumer:
    """A process that is started again whenever it has ended."""

    def __init__(self, url: str, name: str) -> None:
        self.command = [sys.executable, __file__, "--consumer", url, name]
        self.name = name
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)
        print(f"{self.name} is process {self.process.pid}", flush=True)

    def look_after(self) -> None:
        if self.process.poll() is not None:
            print(f"{self.name} has died; another one takes its place", flush=True)
            self.start()

    def end(self) -> None:
        self.process.kill()  # it has nothing left to do, and needs no good-bye
        self.process.wait()


def main(url: str, text: list[str]) -> None:
    with native.Client(url) as bus:
        for topic in (LINES, COUNTS):
            if bus.topics(topic):  # of a run that did not come to its end
                bus.drop_topic(topic)
            bus.create_topic(topic, shards=6)
        consumers = [Consumer(url, f"counter-{number}") for number in range(CONSUMERS)]
        with fdq.Producer(url) as producer:
            for number, line in enumerate(text):
                producer.produce_nowait(LINES, str(number), line.encode())
        while not is_done(bus, len(text)):
            for consumer in consumers:
                consumer.look_after()
            time.sleep(0.1)
        for consumer in consumers:
            consumer.end()
        for word, times in total(url).most_common():
            print(f"{times:8} {word}")
        for topic in (LINES, COUNTS):
            bus.drop_topic(topic)


def is_done(bus: native.Client, lines: int) -> bool:
    stats = bus.topic_stats(LINES)["all"]
    return bool(stats["acked"] == stats["inserted"] == lines)


def total(url: str) -> Counter[str]:
    """What all have counted: the topic, read from its beginning."""
    found: Counter[str] = Counter()
    for one in fdq.replay(url, COUNTS):
        found[one.shard_key or ""] += int(one.message)
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--consumer"]:
        consume(*sys.argv[2:])
    else:
        given = dict(zip(("url", "file"), sys.argv[1:], strict=False))
        file = Path(given.get("file", __file__))  # without one, its own words
        main(given.get("url", native.DEFAULT_URL), file.read_text().splitlines())
