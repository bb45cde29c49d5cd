"""`make demo`: a bus, a sink and a pusher, for a few seconds.

Everything here is the `polybus` command, run the way you would in three shells:

    polybus serve
    polybus rqueue sink
    polybus rqueue pusher

but on a free port and with a data folder of its own, so that it disturbs no bus of
yours. The sink prints what arrives; `polybus stats` has the last word.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

from polybus.testing.bus_process import POLYBUS, BusProcess, serve

DEMO_S = 5.0
WAIT_S = 30.0  # for the sink to be there; it takes a moment on a cold machine


def client(bus: BusProcess, name: str) -> subprocess.Popen[bytes]:
    command = [*POLYBUS, "rqueue", name, "--port", str(bus.address("rqueue").port)]
    print("$ polybus", *command[len(POLYBUS) :], flush=True)
    return subprocess.Popen(command, env=bus.env)


def wait_for_subscriber(bus: BusProcess) -> None:
    """The bus relays to current subscribers: pushing before the sink subscribes shows nothing."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        connections = json.loads(bus.run("connections", "--json").stdout)
        if any(connection["subscriptions"] for connection in connections):
            return
    sys.exit("demo: the sink did not subscribe")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C: both clients then print a summary."""
    process.send_signal(signal.SIGINT)
    process.wait(WAIT_S)


def main() -> None:
    print("$ polybus serve", flush=True)
    with serve() as bus:
        sink = client(bus, "sink")
        wait_for_subscriber(bus)
        pusher = client(bus, "pusher")
        time.sleep(DEMO_S)
        end(pusher)
        end(sink)
        print("$ polybus stats")
        print(bus.run("stats").stdout)


if __name__ == "__main__":
    main()
