"""The client of `polybus://` URLs: durable topics of a running bus, by batches.

    with native.Client("polybus://127.0.0.1:6570") as bus:
        with bus.producer("importer") as producer:
            producer.produce("orders", [b"one", b"two"]).result()
        for batch in bus.read("orders"):
            print(batch.num_rows)

It blocks, and every method may be called from any thread. A restart of the bus is
waited out: what was not answered is sent again with the same stamps, so it is
there once.
"""

from __future__ import annotations

from polybus.native.client import Client
from polybus.native.options import DEFAULT_URL, ClientOptions, bus_url
from polybus.native.producing import Produced, Producer
from polybus.native.reading import Reading
from polybus.native.staging import Stage

__all__ = [
    "DEFAULT_URL",
    "Client",
    "ClientOptions",
    "Produced",
    "Producer",
    "Reading",
    "Stage",
    "bus_url",
]
