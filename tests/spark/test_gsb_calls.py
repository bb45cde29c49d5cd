"""The audit log of GSB calls in Spark: one row per call."""

from __future__ import annotations

from pyspark.sql import functions as f

from tests.rig import gsb_peer
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

CALLS = 300
ROW = "caller string, address string, service string, code int, reply_bytes long, replies long"


def test_each_call_is_one_row(spark):
    env = {"POLYBUS_GSB_AUDIT": "true"}
    with NativeBus(listen=("gsb=tcp://127.0.0.1:0",), env=env) as bus, bus.client() as client:
        address = bus.process.address("gsb")
        with gsb_peer.connect(address) as service, gsb_peer.connect(address) as caller:
            service.register("greeter")
            make_calls(service, caller)
        until(lambda: client.bounds("gsb.calls")["next_id"] == CALLS + 2, "the log to be complete")
        log = spark.read.format("polybus").options(bus=bus.url, topic="gsb.calls").load()
        parsed = log.select(f.from_json(f.col("body").cast("string"), ROW).alias("call"))
        counts = parsed.groupBy("call.service", "call.code").agg(
            f.count("*").alias("calls"), f.sum("call.reply_bytes").alias("bytes")
        )
        rows = {tuple(row) for row in counts.collect()}
        assert rows == {("greeter", 0, CALLS, 2 * CALLS), ("", 404, 1, 0)}


def make_calls(service: gsb_peer.Peer, caller: gsb_peer.Peer) -> None:
    for n in range(CALLS):
        caller.send(gsb_peer.call("greeter/many", str(n), b"x"))
    caller.send(gsb_peer.call("unknown", "x"))
    for _ in range(CALLS):
        service.send(gsb_peer.reply(service.call().request_id, b"hi"))
    for _ in range(CALLS + 1):
        caller.reply()
