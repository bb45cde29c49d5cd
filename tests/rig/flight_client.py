"""The native port by Arrow Flight alone, for tests that must not trust our own client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

if TYPE_CHECKING:
    from polybus.testing.bus_process import BusProcess

SHORT = pa.schema([("shard_key", pa.utf8()), ("body", pa.binary())])


def connect(bus: BusProcess, **options: Any) -> flight.FlightClient:
    """Return a client with its own connection; Arrow shares one between clients of an address."""
    address = bus.address("native")
    own = [("grpc.use_local_subchannel_pool", 1)]
    location = f"{address.scheme}://{address.host}:{address.port}"
    return flight.connect(location, generic_options=own, **options)


def act(client: Any, name: str, /, *, options: Any = None, **fields: object) -> Any:
    """Return the answer of an action."""
    action = flight.Action(name, json.dumps(fields).encode())
    (result,) = client.do_action(action, options)
    return json.loads(result.body.to_pybytes())


def refused(client: Any, name: str, /, **fields: object) -> str:
    """Return the code of the error that an action ends with."""
    try:
        answer = act(client, name, **fields)
    except flight.FlightError as error:
        return code_of(error)
    raise AssertionError(f"{name} was answered: {answer}")


def code_of(error: flight.FlightError) -> str:
    info = json.loads(error.extra_info)
    assert set(info) == {"code", "text"}
    assert info["text"]
    return str(info["code"])


def batch(*messages: bytes) -> pa.RecordBatch:
    """Messages without keys."""
    columns = [pa.nulls(len(messages), pa.utf8()), pa.array(messages, pa.binary())]
    return pa.record_batch(columns, schema=SHORT)


class Put:
    """A put stream."""

    def __init__(self, client: Any, *path: str) -> None:
        self.writer, self.reader = client.do_put(flight.FlightDescriptor.for_path(*path), SHORT)

    def send(self, *messages: bytes, stamp: object = None) -> None:
        if stamp is None:
            self.writer.write_batch(batch(*messages))
        else:
            self.writer.write_with_metadata(batch(*messages), json.dumps(stamp).encode())

    def answer(self) -> Any:
        """Return the next answer. Raises the error that ended the stream."""
        raw = self.reader.read()
        if raw is None:
            self.writer.close()
            raise EOFError("the stream has ended")
        return json.loads(raw.to_pybytes())

    def ask(self, *messages: bytes, stamp: object = None) -> Any:
        self.send(*messages, stamp=stamp)
        return self.answer()

    def close(self) -> None:
        self.writer.close()


def produce(client: Any, topic: str, *messages: bytes, stamp: object = None) -> Any:
    """Produce one batch on a stream of its own. Returns the answer."""
    put = Put(client, "produce", topic)
    answer = put.ask(*messages, stamp=stamp)
    put.close()
    return answer


def put_codes(
    client: Any, path: Sequence[str], batches: Sequence[pa.RecordBatch], stamp: object = None
) -> list[str | None]:
    """Return the error code of each batch of a stream, None if it was accepted."""
    put = Put(client, *path)
    codes = []
    for rows in batches:
        metadata = b"" if stamp is None else json.dumps(stamp).encode()
        put.writer.write_with_metadata(rows, metadata)
        codes.append(put.answer().get("error", {}).get("code"))
    put.close()
    return codes


def read(client: Any, **ticket: object) -> pa.Table:
    return client.do_get(flight.Ticket(json.dumps(ticket).encode())).read_all()


def bodies(client: Any, **ticket: object) -> list[bytes]:
    found: list[bytes] = read(client, **ticket).column("body").to_pylist()
    return found
