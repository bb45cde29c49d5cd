"""The call log of a real bus has every call that ended before the bus stopped."""

from __future__ import annotations

import json

from tests.rig import gsb_peer
from tests.rig.native_bus import NativeBus


def test_stopped_bus_has_logged_every_call():
    env = {"POLYBUS_GSB_AUDIT": "true"}
    with NativeBus(listen=("gsb=tcp://127.0.0.1:0",), env=env) as bus:
        with gsb_peer.connect(bus.process.address("gsb")) as caller:
            for n in range(100):
                caller.send(gsb_peer.call("sys/ping", str(n), b"x" * n))
                caller.reply()
            caller.send(gsb_peer.call("unknown", "x"))
            caller.reply()
            assert bus.stop() == 0
        bus.start()
        with bus.client() as client:
            batches = client.read("gsb.calls")
            bodies = [body for batch in batches for body in batch.column("body").to_pylist()]
    rows = [json.loads(body) for body in bodies]
    assert [(row["address"], row["code"]) for row in rows] == [
        *[("sys/ping", 0)] * 100,
        ("unknown", 404),
    ]
    assert [row["reply_bytes"] for row in rows[:100]] == list(range(100))
