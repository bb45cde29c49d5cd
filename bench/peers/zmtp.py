"""How a client of the load generator opens a connection to a ROUTER."""

from bench.harness.load import Hello
from tests.rig.pirate.zmtp import GREETING, READY_ENDS, ready


def hello() -> Hello:
    return Hello(GREETING + ready(), until=READY_ENDS)
