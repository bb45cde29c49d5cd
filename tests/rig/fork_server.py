"""A process that has imported its children's modules, and forks them on request.

A child costs a fork and not the start of an interpreter: some milliseconds. The server is not
the process of the tests, whose threads no fork would survive; the modules it imports must not
start a thread.

    with ForkServer(["tests.rig.store.child"]) as server:
        child = server.fork("tests.rig.store.child:work", [folder, 7])
        child.kill()
        child.wait()                                 # -9

`ChildServer` adds answers, `ClientPool` (tests/rig/fdq) many clients at once, and `warm_bus`
starts buses and commands this way.

A child has one socket to its starter: its command and its files go in, its pid comes out, and
its exit code when it has ended. The server waits for a child only after it has sent that code,
so the pid cannot belong to another process before its starter knows of the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from tests.rig.closing import Closing

MAX_REQUEST_BYTES = 128 * 1024
PR_SET_PDEATHSIG = 1


class ChildFailed(Exception):
    """A child that had to answer did not, or the fork server has ended."""


class ForkedProcess:
    """A forked child; the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        self._channel = channel

    @property
    def has_ended(self) -> bool:
        return self.poll() is not None

    def poll(self) -> int | None:
        return self._receive_code(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or minus the signal that ended the child."""
        code = self._receive_code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired([f"forked child {self.pid}"], timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Stop waiting for the child's end."""
        self._channel.close()

    def _receive_code(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                message = self._channel.recv(MAX_REQUEST_BYTES)
            except (TimeoutError, BlockingIOError):
                return None
            if not message:
                raise ChildFailed("the fork server has ended")
            self.returncode = json.loads(message)
            self._channel.close()
        return self.returncode


class ForkServer(Closing):
    """The server process, seen from the tests."""

    def __init__(
        self,
        modules: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        children_survive: bool = False,
    ) -> None:
        """Start the server; it imports `modules` once.

        With `children_survive`, children go on after the server has ended.
        """
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._children_survive = children_survive
        self._children: list[ForkedProcess] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                env={**os.environ, **(env or {})},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def fork(
        self,
        function: str,
        args: Sequence[Any] = (),
        *,
        env: Mapping[str, str] | None = None,
        stdout: int = 2,
        stderr: int = 2,
    ) -> ForkedProcess:
        """Fork a child that calls `function` ("module:name") and exits with its result.

        `env` replaces the whole environment of the child.
        """
        request = Request(
            str(Path.cwd()),
            function,
            list(args),
            None if env is None else dict(env),
            not self._children_survive,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            files = [theirs.fileno(), stdout, stderr]
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], files)
            except BrokenPipeError:
                ours.close()
                raise ChildFailed("the fork server has ended") from None
        message = ours.recv(MAX_REQUEST_BYTES)
        if not message:
            ours.close()
            raise ChildFailed("the fork server has ended")
        child = ForkedProcess(json.loads(message), ours)
        self._children = [one for one in self._children if one.returncode is None]
        self._children.append(child)
        return child

    def close(self) -> None:
        """End the server, and its children unless they survive it."""
        self._channel.close()
        if not self._children_survive:
            self._process.kill()
        self._process.wait()
        for child in self._children:
            child.close()


# --- children that answer


class ChildResult(NamedTuple):
    """How a child ended. `signal` is 0 if none killed it; `failure` is a traceback."""

    signal: int
    answer: Any = None
    failure: str = ""


class ChildServer(Closing):
    """Children that call a function of one module and answer with JSON.

    The answer goes to a file, so it is there even if the child is killed after it wrote it.
    """

    def __init__(self, module: str, env: Mapping[str, str] | None = None) -> None:
        self._module = module
        self._server = ForkServer([module], env)
        self._folder = tempfile.TemporaryDirectory(prefix="pb-children-")
        self._count = 0

    def start(self, function: str, *args: Any) -> AnsweringChild:
        self._count += 1
        answer = Path(self._folder.name, f"answer-{self._count}")
        child = self._server.fork(
            f"{__name__}:write_answer", [str(answer), self._module, function, list(args)]
        )
        return AnsweringChild(child, answer)

    def run(self, function: str, *args: Any) -> ChildResult:
        return self.start(function, *args).wait()

    def ask(self, function: str, *args: Any) -> Any:
        """Return the child's answer. Raises ChildFailed if it fails or dies."""
        result = self.run(function, *args)
        if result.signal or result.failure:
            raise ChildFailed(f"{function}: signal {result.signal}\n{result.failure}")
        return result.answer

    def close(self) -> None:
        self._server.close()
        self._folder.cleanup()


class AnsweringChild:
    def __init__(self, child: ForkedProcess, answer: Path) -> None:
        self._child = child
        self._answer = answer
        self.pid = child.pid

    @property
    def has_ended(self) -> bool:
        return self._child.has_ended

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._child.send_signal(number)

    def wait(self) -> ChildResult:
        code = self._child.wait()
        if code < 0:
            return ChildResult(-code)
        return ChildResult(0, **json.loads(self._answer.read_text()))


def write_answer(path: str, module: str, function: str, args: list[Any]) -> NoReturn:
    try:
        result = {"answer": getattr(importlib.import_module(module), function)(*args)}
    except BaseException:
        result = {"failure": traceback.format_exc()}
    Path(path).write_text(json.dumps(result))
    os._exit(0)  # threads that the function has left must not keep the child alive


# --- in the server process


class Request(NamedTuple):
    folder: str
    function: str
    args: list[Any]
    env: dict[str, str] | None
    dies_with_server: bool


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends.

    A forked child passes its parent's pid, because the parent may have ended before this call.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(fd: int, modules: Sequence[str]) -> int:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a child's collector would touch, and so copy, all shared memory
    request = _serve(socket.socket(fileno=fd))
    return 0 if request is None else _call(request)


def _serve(requests: socket.socket) -> Request | None:
    """Fork for each request. Returns it in the child; None in the server when its user is gone."""
    with requests, selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    _report_end(selector, *key.data)
                    continue
                message, files, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
                if not message:
                    return None
                server, pid = os.getpid(), os.fork()
                if pid == 0:
                    request = Request(*json.loads(message))
                    if request.dies_with_server:
                        die_with_parent(server)
                    _close_inherited(selector)
                    return _enter(request, files)
                _watch(selector, pid, files)


def _close_inherited(selector: selectors.BaseSelector) -> None:
    """Close the files of other children."""
    for key in selector.get_map().values():
        if key.data is not None:
            pidfd, _pid, channel = key.data
            os.close(pidfd)
            channel.close()


def _watch(selector: selectors.BaseSelector, pid: int, files: list[int]) -> None:
    channel = socket.socket(fileno=files[0])
    for fd in files[1:]:
        os.close(fd)
    channel.send(json.dumps(pid).encode())
    pidfd = os.pidfd_open(pid)
    selector.register(pidfd, selectors.EVENT_READ, (pidfd, pid, channel))


def _report_end(
    selector: selectors.BaseSelector, pidfd: int, pid: int, channel: socket.socket
) -> None:
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(BrokenPipeError):  # its starter may have gone
        channel.send(json.dumps(code).encode())
    selector.unregister(pidfd)
    os.close(pidfd)
    channel.close()
    os.waitpid(pid, 0)


def _enter(request: Request, files: list[int]) -> Request:
    """Take over the environment and files of the request."""
    channel, stdout, stderr = files
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for fd in (channel, stdout, stderr):
        os.close(fd)
    if request.env is not None:
        os.environ.clear()
        os.environ.update(request.env)
    os.chdir(request.folder)
    return request


def _call(request: Request) -> int:
    """Call the function; the interpreter then ends as that of a program does."""
    module, _, name = request.function.partition(":")
    result = getattr(importlib.import_module(module), name)(*request.args)
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
