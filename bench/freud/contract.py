"""What this benchmark needs to know of a server: how to start it, and what to say to it.

The shapes of load, one dialogue of each for every server that can do it:

  ROUND_TRIP    one message and its acknowledgement, one at a time, one process plays all parties
  METHOD_CALL   the same, but on D-Bus the service is a process of its own
  REQUEST       a request and its reply, one at a time, between two processes
  BURST, FLOW   pipelined, see bench/load/flow.c

What is one round trip?

  Freud   Produce and its answer, Get and its answer
  echo    two requests and their answers, of the same sizes
  D-Bus   a method call, from its caller to the bus to its service, and the return the same way

In each, one message gets from one party to another by way of the server, and its sender learns of
that. In each, the server is asked twice, and sockets are crossed four times. So ROUND_TRIP compares
the servers crossing by crossing: on D-Bus, too, one process sends and waits, sends and waits, on a
connection for each party. That favours the buses, for a real service is another process, and waking
it takes its time. METHOD_CALL is the call as programs make it; Freud's client is the same in both.

REQUEST is what a program would do that wants an answer: over Freud the reply takes a second topic,
and so a Produce and a Get each way, where the next Get is sent together with the Produce before it.
There sockets are crossed six times, on D-Bus four. It has no target; it tells what that costs.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from bench.freud.dialogues import Dialogue
from bench.harness.workloads import FILLER

ROUND_TRIP, METHOD_CALL, REQUEST = "round-trip", "method-call", "request"
BURST, FLOW = "burst", "flow"
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
