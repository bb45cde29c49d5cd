"""Messages and refusals of the native port are counted in `polybus stats`."""

from __future__ import annotations

import pytest

from polybus.errors import DoesNotExist, MalformedRequest
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until


def test_batches_and_reads_are_counted():
    with NativeBus() as bus, bus.client() as client:
        with client.producer() as producer:
            producer.produce("t", [b"one", b"three"]).result()
        assert sum(batch.num_rows for batch in client.read("t")) == 2
        messages = client.stats()["messages"]
    assert messages["received"] == 2
    assert messages["delivered"] == 2
    assert messages["delivered_bytes"] == len("onethree")
    assert messages["received_bytes"] > len("onethree")


def test_refusals_are_counted_by_their_code():
    with NativeBus() as bus, bus.client() as client:
        with pytest.raises(DoesNotExist):
            client.topic("nowhere")
        with pytest.raises(MalformedRequest):
            client.act("topic.info")
        wanted = {"native_does_not_exist": 1, "native_malformed_request": 1}
        until(lambda: client.stats()["refused"] == wanted, "both are counted")
