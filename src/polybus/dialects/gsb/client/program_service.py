"""A program as a service: the request on its stdin, its lines as a stream.

Each call starts the command anew. It gets the request's data as one line of JSON on
stdin, and the call in its environment ($GSB_ADDRESS, $GSB_METHOD, $GSB_CALLER). Each line it
prints is an item: JSON where it is JSON, text otherwise. If it ends with another code
than 0 the call fails, with the last line of its stderr. A cancelled call ends it
(SIGTERM, then SIGKILL), and what it started with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from typing import Any

from polybus.dialects.gsb.client.service_host import Call
from polybus.errors import ServiceFailed
from polybus.model.limits import KIB, MIB

# The longest line; a packet holds no more.
MAX_LINE_BYTES = 16 * MIB
# Of stderr the end is kept: that is where programs say what went wrong.
KEPT_STDERR_BYTES = 4 * KIB
END_TIMEOUT_S = 2.0
POLL_S = 0.02
NOT_STARTED = 127  # as shells say it


class ProgramService:
    """The handler: `bus.register(id, ProgramService(["command", …]))`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    async def __call__(self, call: Call) -> AsyncIterator[Any]:
        request = as_json(call.data).encode() + b"\n"
        process = await self._start(call)
        feeding = asyncio.create_task(_write_request(process, request))
        stderr = asyncio.create_task(_read_stderr_tail(process))
        ended = False
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                yield _item(line)
            code = await process.wait()
            ended = True
            if code:
                raise ServiceFailed(_failure_text(code, await stderr), status=500)
        except ValueError:
            raise ServiceFailed(f"a line of more than {MAX_LINE_BYTES} bytes", 413) from None
        finally:
            if not ended:
                await _terminate(process)
            for task in (feeding, stderr):
                task.cancel()

    async def _start(self, call: Call) -> Process:
        about = {"GSB_ADDRESS": call.address, "GSB_METHOD": call.method, "GSB_CALLER": call.caller}
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                limit=MAX_LINE_BYTES,
                env={**os.environ, **about},
                start_new_session=True,
            )
        except OSError as error:
            reason = f"{self._command[0]}: {error.strerror or error}"
            raise ServiceFailed(reason, status=NOT_STARTED) from None


def as_json(value: Any) -> str:
    """For people and programs; bytes, which JSON has not, as an object with their base64."""
    return json.dumps(value, ensure_ascii=False, default=_json_default)


def _json_default(value: Any) -> Any:
    import base64

    if isinstance(value, bytes | bytearray | memoryview):
        return {"base64": base64.b64encode(value).decode()}
    return str(value)


def _item(line: bytes) -> Any:
    text = line.rstrip(b"\r\n").decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


async def _write_request(process: Process, request: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(request)
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # a program need not read its request


async def _read_stderr_tail(process: Process) -> str:
    assert process.stderr is not None
    kept = b""
    while data := await process.stderr.read(KEPT_STDERR_BYTES):
        kept = (kept + data)[-KEPT_STDERR_BYTES:]
    lines = kept.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


def _failure_text(code: int, last_words: str) -> str:
    how = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"the program {how}: {last_words}" if last_words else f"the program {how}"


async def _terminate(process: Process) -> None:
    """Of all that it started: it may be over itself while they are not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(process, number)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
                while _signal(process, 0):  # noqa: ASYNC110  nobody tells when a group is empty
                    await asyncio.sleep(POLL_S)
                return
        except TimeoutError:
            pass


def _signal(process: Process, number: int) -> bool:
    """A session of its own: its group has its pid. Is anybody there? (0 only asks.)"""
    try:
        os.killpg(process.pid, number)
    except OSError:
        return False
    return True
