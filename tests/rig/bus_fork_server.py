"""The process that `warm` asks for buses: it has loaded all of one, and forks.

A child has one connection: its command and its files go in, its number comes out, and when it
has ended, how. It stays a zombie until that is said, so that its number means nobody else.
Nothing that is loaded here may start a thread that matters: no fork would survive it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import socket
import sys
from typing import NamedTuple

LOADED = (
    "polybus.cli.serve_command",
    "polybus.dialects.rqueue.cli",
    "polybus.server.app",
    "polybus.dialects.pirate.server.pirate_server",
    "polybus.store.lmdb.lmdb_store",
    "polybus.store.memory.memory_store",
    "polybus.transports.flight.flight_listener",
    "polybus.dialects.rqueue.server.session",
    "polybus.dialects.freud.server.session",
    "polybus.dialects.gsb.server.session",
    "typer._adapters",
)
MAX_REQUEST_BYTES = 128 * 1024


class Request(NamedTuple):
    folder: str
    args: list[str]
    env: dict[str, str]


def main(fd: int) -> int:
    for module in LOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a child's collector would touch, and so copy, all that it shares
    request = _fork_for(socket.socket(fileno=fd))
    if request is None:
        return 0
    sys.argv = ["polybus", *request.args]
    run: int = importlib.import_module("polybus.cli.main").run(request.args)
    return run


def _fork_for(asked: socket.socket) -> Request | None:
    """In a child what it is to do; here None, when nobody can ask any more."""
    with asked, selectors.DefaultSelector() as selector:
        selector.register(asked, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    _tell(selector, *key.data)
                    continue
                said, files, _, _ = socket.recv_fds(asked, MAX_REQUEST_BYTES, 3)
                if not said:
                    return None
                pid = os.fork()
                if pid == 0:
                    _forget(selector)
                    return _become(Request(*json.loads(said)), files)
                _watch(selector, pid, files)


def _forget(selector: selectors.BaseSelector) -> None:
    """The files of others are not ours."""
    for key in selector.get_map().values():
        if key.data is not None:
            alive, _pid, talk = key.data
            os.close(alive)
            talk.close()


def _watch(selector: selectors.BaseSelector, pid: int, files: list[int]) -> None:
    talk = socket.socket(fileno=files[0])
    for fd in files[1:]:
        os.close(fd)
    talk.send(json.dumps(pid).encode())
    alive = os.pidfd_open(pid)
    selector.register(alive, selectors.EVENT_READ, (alive, pid, talk))


def _tell(selector: selectors.BaseSelector, alive: int, pid: int, talk: socket.socket) -> None:
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    try:
        talk.send(json.dumps(code).encode())
    except BrokenPipeError:
        pass  # nobody waits for it
    selector.unregister(alive)
    os.close(alive)
    talk.close()
    os.waitpid(pid, 0)


def _become(request: Request, files: list[int]) -> Request:
    """The environment and files of the command."""
    talk, stdout, stderr = files
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for fd in (talk, stdout, stderr):
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.folder)
    return request


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
