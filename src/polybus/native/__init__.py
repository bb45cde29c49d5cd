"""The client of `polybus://` URLs: durable topics of a running bus, by batches.

    with native.Client("polybus://127.0.0.1:6570") as bus:
        with bus.producer("importer") as producer:
            producer.produce("orders", [b"one", b"two"]).result()
        for batch in bus.read("orders"):
            print(batch.num_rows)

Calls block and are thread-safe. After a restart of the bus the client sends unanswered
batches again with the same stamps, so each is stored exactly once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from polybus.native.client.client import Client
    from polybus.native.client.native_options import DEFAULT_URL, ClientOptions, bus_url
    from polybus.native.client.native_producer import Produced, Producer
    from polybus.native.client.range_reader import Reading
    from polybus.native.client.stage import Stage

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Client": ".client.client",
        "ClientOptions": ".client.native_options",
        "DEFAULT_URL": ".client.native_options",
        "Produced": ".client.native_producer",
        "Producer": ".client.native_producer",
        "Reading": ".client.range_reader",
        "Stage": ".client.stage",
        "bus_url": ".client.native_options",
    },
)
