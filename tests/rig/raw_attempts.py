"""One request about a topic, by a raw client of each dialect, and its outcome in a word.

    attempt("freud", address, "produce", "orders.dlq")     # "denied"

The outcome is OK, or the dialect's own word or number for the refusal. rqueue answers nothing
(SENT): look at the readers and the counters of the bus.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import pyarrow.flight as flight

from polybus.model.address import Address
from tests.rig import flight_client, freud_client, rqueue_client
from tests.rig.installed_dialects import has_dialect
from tests.rig.pirate.zmq_client import Bare

if has_dialect("gsb"):
    from tests.rig import gsb_peer

OK: Final = "ok"
SENT: Final = "sent"
BODY: Final = b"forged"
# Each dialect's code for a refusal by the policy.
DENIED: Final = {"native": "denied", "freud": "no", "gsb": "403", "pirate": "DENIED"}
FREUD_CODES = ("ok", "nothing_happened", "no", "doesnt_exist", "malformed", "server_error")


def attempt(dialect: str, place: Address, verb: str, topic: str) -> str:
    return ATTEMPTS[dialect](place, verb, topic)


def _native(place: Address, verb: str, topic: str) -> str:
    actions: dict[str, dict[str, Any]] = {
        "topic.create": {"shards": 1},
        "topic.configure": {"settings": {}},
        "topic.drop": {},
        "topic.trim": {"before": {"0": 1}},
        "topic.reshard": {"shards": 2},
        "group.join": {"group": "g", "consumer": "c"},
    }
    with flight.connect(f"grpc://{place.host}:{place.port}") as client:
        try:
            if verb in actions:
                flight_client.act(client, verb, topic=topic, **actions[verb])
            elif verb == "subscribe":
                flight_client.read(client, topic=topic)
            else:
                answer = flight_client.produce(client, topic, BODY)
                return str(answer["error"]["code"]) if "error" in answer else OK
        except flight.FlightError as error:
            return flight_client.code_of(error)
    return OK


def _freud(place: Address, verb: str, topic: str) -> str:
    name = topic.encode()
    requests = {
        "create": freud_client.create(name),
        "delete": freud_client.delete(name),
        "subscribe": freud_client.subscribe(name),
        "produce": freud_client.produce(name, BODY),
    }
    with freud_client.connect(place) as client:
        return FREUD_CODES[client.ask(requests[verb]).code]


def _gsb(place: Address, verb: str, topic: str) -> str:
    with gsb_peer.connect(place) as peer:
        if verb == "produce":
            peer.send(gsb_peer.packet("broadcast_request", topic=topic, data=BODY))
            code = peer.next("broadcast_reply").code
        else:
            peer.send(gsb_peer.packet("subscribe_request", topic=topic))
            code = peer.next("subscribe_reply").code
    return str(code) if code else OK


def _pirate(place: Address, verb: str, topic: str) -> str:
    with Bare(f"tcp://{place.host}:{place.port}", random.randbytes(8)) as client:
        client.hello()
        answer = client.put(topic, BODY) if verb == "produce" else client.sub(topic)
    return OK if answer[0] == "OK" else str(answer[1])


def _rqueue(place: Address, verb: str, topic: str) -> str:
    with rqueue_client.connect(place) as client:
        name = topic.encode()
        client.send(
            rqueue_client.publish(name, BODY)
            if verb == "produce"
            else rqueue_client.subscribe(name)
        )
        client.settle()
    return SENT


ATTEMPTS: dict[str, Callable[[Any, str, str], str]] = {
    "native": _native,
    "freud": _freud,
    "gsb": _gsb,
    "pirate": _pirate,
    "rqueue": _rqueue,
}
