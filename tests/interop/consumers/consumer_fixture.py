"""Helpers of the tests of FDQ consumers."""

from contextlib import closing
from typing import Any

from polybus import fdq
from polybus.native import bus_client as buses

QUICK: dict[str, Any] = {"first_backoff_s": 0.005, "last_backoff_s": 0.02}


def unhurried(url):
    """Return a consumer that does not expire if the machine is stopped for a while."""
    return fdq.Consumer(url, heartbeat_s=0.5, dead_s=120.0)


def produce(url, topic, *messages, headers=None):
    with fdq.Producer(url) as producer:
        requests = [fdq.MessageRequest(key, body, headers) for key, body in messages]
        return producer.produce_batch(topic, requests)


def numbered(count, keys=7):
    return [(f"key-{n % keys}", b"%d" % n) for n in range(count)]


def group(url, topic, name="default"):
    return next(one for one in fdq.stats(url, topic)["groups"] if one["group"] == name)


def acked(url, topic):
    return sum(shard["acked"] for shard in group(url, topic)["shards"])


def total(url, topic, what):
    return fdq.stats(url, topic)["all"][what]


class Seen(list):
    """A handler that collects its messages."""

    def __call__(self, envelope):
        self.append(envelope)

    @property
    def bodies(self):
        return [one.message for one in self]


def fdq_bus(url):
    return closing(buses.connect(url))


def spread(url, topic):
    return sorted(len(one["shards"]) for one in group(url, topic)["members"])
