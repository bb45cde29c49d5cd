"""Clients of a round, many at once, each a process forked by one fork server.

with ClientPool() as pool:
    client = pool.start("consume", orders)
    client.signal(signal.SIGSTOP)
    client.signal(signal.SIGKILL)
    client.wait()                    # -9
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from dataclasses import asdict
from typing import Any, NoReturn

from tests.rig.closing import Closing
from tests.rig.fork_server import ForkedProcess, ForkServer

CLIENTS = "tests.rig.fdq.clients"


class ClientPool(Closing):
    """Clients are functions of `module`; its dataclass `Orders` has the arguments of one."""

    def __init__(self, module: str = CLIENTS) -> None:
        self._module = module
        self._server = ForkServer([module])
        self.children: list[ClientProcess] = []

    def start(self, function: str, orders: Any) -> ClientProcess:
        arguments = [self._module, function, asdict(orders)]
        child = ClientProcess(self._server.fork(f"{__name__}:run_client", arguments), orders)
        self.children.append(child)
        return child

    def close(self) -> None:
        """End the server and all clients."""
        self._server.close()


class ClientProcess:
    """A client process: running, stopped, or ended."""

    def __init__(self, child: ForkedProcess, orders: Any) -> None:
        self._child = child
        self.pid = child.pid
        self.orders = orders

    @property
    def name(self) -> str:
        return str(self.orders.name)

    @property
    def has_ended(self) -> bool:
        return self._child.has_ended

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def wait(self) -> int:
        """Return the exit code, or minus the signal that ended it."""
        return self._child.wait()


def run_client(module: str, function: str, orders: dict[str, Any]) -> NoReturn:
    clients = importlib.import_module(module)
    code = 1
    try:
        getattr(clients, function)(clients.Orders(**orders))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # threads of the client must not keep the process alive
