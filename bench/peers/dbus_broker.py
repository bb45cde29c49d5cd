"""dbus-broker, from Debian, started without systemd.

dbus-broker listens to nothing by itself: a controller, the other end of a socket that it inherits,
hands it the listening socket and the policy. Its own launcher is such a controller, but that one
needs the journal and systemd. So this file, run as a program, is a controller too:

    python -m bench.peers.dbus_broker PROGRAM PATH

It forks; the child is the controller, the process itself becomes dbus-broker, so that its parent
has the broker's pid. Either ends when the other does. The controller allows everything,
and prints `ready`.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.freud.contract import SOCKET_FOLDER
from bench.harness.places import installed
from bench.harness.programs import Program
from bench.peers import dbus_wire as wire
from bench.peers.dbus import SHAPES, RunningBus, address_field, answer_body, authenticate

BROKER = "dbus-broker"
MACHINE_ID = "0123456789abcdef0123456789abcdef"  # it must have one
BACKLOG = 16

LISTENER = "/org/bus1/DBus/Listener/0"
# Who may connect; own names; send; receive. Each rule is a verdict, a priority, and what it is for.
RULES = "(bta(btbs)a(btssssuutt)a(btssssuutt))"
# Rules by uid; by range of uids or gids; for SELinux; whether AppArmor; the kind of bus.
POLICY = f"(a(u{RULES})a(buu{RULES})a(ss)bs)"
EVERY_UID = 2**32 - 1
ANY_FDS = (0, 2**64 - 1)
MESSAGES = (True, 1, "", "", "", "", 0, 0, *ANY_FDS)
ALLOW = (True, 1, [(True, 1, True, "")], [MESSAGES], [MESSAGES])
ALLOW_ALL: tuple[Any, ...] = ([(EVERY_UID, ALLOW)], [], [], False, "user")


def _control(controller: socket.socket, listener: socket.socket) -> None:
    """Hands the listening socket over, and stays until the broker ends."""
    authenticate(controller, b"NEGOTIATE_UNIX_FD")
    fields = [
        *address_field("/org/bus1/DBus/Broker", "org.bus1.DBus.Broker", "AddListener"),
        (wire.SIGNATURE, "g", "ohv"),
        (wire.UNIX_FDS, "u", 1),
    ]
    body = wire.marshal("ohv", (LISTENER, 0, (POLICY, ALLOW_ALL)))
    request = wire.message(wire.CALL, 1, fields, body)
    socket.send_fds(controller, [request], [listener.fileno()])
    answer_body(controller)
    print("ready", flush=True)
    while controller.recv(4096):
        pass


def main() -> None:
    program, path = sys.argv[1:]
    ours, its = socket.socketpair()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    if os.fork() == 0:
        its.close()
        _control(ours, listener)
        return
    os.set_inheritable(its.fileno(), True)
    handle = str(its.fileno())
    os.execl(program, program, "--controller", handle, "--machine-id", MACHINE_ID)


class DbusBroker:
    name = BROKER
    shapes = SHAPES

    @contextmanager
    def start(self) -> Iterator[RunningBus]:
        binary = installed(BROKER, "apt-get install dbus-broker")
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        with tempfile.TemporaryDirectory(prefix="pb-", dir=SOCKET_FOLDER) as folder:
            path = f"{folder}/bus.sock"
            module = [sys.executable, "-m", "bench.peers.dbus_broker"]
            with Program(self.name, [*module, binary, path]) as program:
                program.line()  # ready
                yield RunningBus(program.pid, said.stdout.split()[-1], path)


if __name__ == "__main__":
    main()
