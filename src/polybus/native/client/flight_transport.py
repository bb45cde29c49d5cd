"""The client's transport to a running bus: actions, reads and put streams over Flight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from polybus.errors import ConnectionLost
from polybus.native.client.flight_connection import FlightConnection
from polybus.native.client.group_fetch import FetchPart, decode_fetch
from polybus.native.client.put_stream import PutStream
from polybus.native.client.sender import Sender
from polybus.native.protocol.requests import GroupFetch, ReadTicket

if TYPE_CHECKING:
    from polybus.native.protocol.answers import ProducerOpened


class FlightTransport(FlightConnection):
    sends_again = True

    def check_open(self) -> None:
        if self.closed.is_set():
            raise ConnectionLost("the client is closed")

    def stream_fetch(self, request: dict[str, Any]) -> Iterator[FetchPart]:
        return decode_fetch(self.stream(GroupFetch.action_name, request), self.url)

    def open_rows(self) -> FlightRows:
        return FlightRows(self)

    def open_stage_stream(self, stage: str, topic: str, schema: pa.Schema) -> PutStream:
        return PutStream(self, ["stage", stage, topic], schema)

    def new_sender(self, opened: ProducerOpened, *, create: bool) -> Sender:
        name, epoch, last_counter = opened["producer"], opened["epoch"], opened["last_counter"]
        return Sender(self, name, epoch, last_counter, create=create)


class FlightRows:
    """Reads by DoGet."""

    def __init__(self, connection: FlightConnection) -> None:
        self._connection = connection
        self._lock = Lock()
        self._reader: Any = None
        self._cancelled = False

    def is_cancelled(self) -> bool:
        return self._cancelled

    def read(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        with self._connection.borrow_client() as client:
            encoded = flight.Ticket(json.dumps(ticket.encode()).encode())
            reader = client.do_get(encoded, self._connection.call_options())
            with self._lock:
                self._reader = reader
                if self._cancelled:  # before there was a reader to cancel
                    reader.cancel()
                    raise ConnectionLost("the read was cancelled")
            try:
                while True:
                    try:
                        chunk = reader.read_chunk()
                    except StopIteration:
                        return
                    if chunk.data is not None and chunk.data.num_rows:
                        yield chunk.data
            finally:
                reader.cancel()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._reader is not None:
                self._reader.cancel()
