"""What this benchmark needs to know of a server: how to start it, and what to say to it.

The shapes of load, one dialogue of each for every server that can do it:

  ROUND_TRIP   one message and its acknowledgement, one at a time, all parties in one thread
  CALL         a request and its reply, one at a time, caller and service in a thread each
  BURST, FLOW  pipelined, see bench/load/flow.c

What is one round trip?

  Freud    Produce and its answer, Get and its answer
  echo     two requests and their answers, of the same sizes
  D-Bus    a method call, from its caller to the bus to its service, and the return the same way

In each, one message gets from one party to another by way of the server, and the sender learns of
it. In each, the server's sockets are crossed four times, and the server is asked twice. On D-Bus
the same thread is caller and service, with a connection each: a service in a process of its own
would cost the buses another two switches of processes, which Freud's client does not need, as it
has one connection. So this comparison is the one that favours the buses; and a bus does nothing
more for the return than for the call (the service's own work is none).

CALL is the other comparison, of what a program would really do: there the service is a thread of
its own, and over Freud the reply takes a second topic, a Produce and a Get each way, the Get sent
together with the Produce before it. The sockets are crossed six times there, four on D-Bus.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from bench.freud.dialogues import Dialogue
from bench.harness.workloads import FILLER

ROUND_TRIP, CALL, BURST, FLOW = "round-trip", "call", "burst", "flow"
SIZE = 128  # bytes of a message
NUMBER_BYTES = 8  # a message sent one at a time begins with its number, a counter
BODY = bytes(NUMBER_BYTES) + FILLER[: SIZE - NUMBER_BYTES]
SOCKET_FOLDER = "/tmp"  # the path of a Unix socket has at most 107 bytes


class Running(Protocol):
    """A server that is up."""

    @property
    def pid(self) -> int:
        """Of the process that does the work."""

    @property
    def version(self) -> str:
        """As it says itself."""

    def dialogue(self, shape: str) -> AbstractContextManager[Dialogue]:
        """Fresh connections, introduced, and what to say on them; leaving the block tidies up."""


class Peer(Protocol):
    """A server that can be started."""

    @property
    def name(self) -> str:
        """As it stands in tables."""

    @property
    def shapes(self) -> frozenset[str]:
        """What it can do."""

    def start(self) -> AbstractContextManager[Running]:
        """Starts it on a Unix socket in a new folder; leaving the block stops it."""
