"""A program as a service: the request on its stdin, its output lines as a stream.

Each call starts the command. It gets the data as one line of JSON on stdin, and the call in its
environment ($GSB_ADDRESS, $GSB_METHOD, $GSB_CALLER). Each output line is an item: JSON if it
is valid JSON, else text. If the exit code is not 0 the call fails with the last line of stderr.
A cancelled call ends the program and its children (SIGTERM, then SIGKILL).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from typing import Any

from polybus.dialects.gsb.client.service_host import Call
from polybus.errors import ServiceFailed
from polybus.model.limits import KIB, MIB

# The longest line that fits into a packet.
MAX_LINE_BYTES = 16 * MIB
# The end of stderr, where programs print their error.
KEPT_STDERR_BYTES = 4 * KIB
END_TIMEOUT_S = 2.0
POLL_S = 0.02
NOT_STARTED = 127  # as in shells


class ProgramService:
    """The handler: `bus.register(id, ProgramService(["command", …]))`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    async def __call__(self, call: Call) -> AsyncIterator[Any]:
        request = as_json(call.data).encode() + b"\n"
        process = await self._start(call)
        feeding = asyncio.create_task(_write_request(process, request))
        stderr = asyncio.create_task(_read_last_error(process))
        ended = False
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                text = line.rstrip(b"\r\n").decode("utf-8", "replace")
                try:
                    item = json.loads(text)
                except ValueError:
                    item = text
                yield item
            code = await process.wait()
            ended = True
            if code:
                how = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
                last_line = await stderr
                text = f"the program {how}: {last_line}" if last_line else f"the program {how}"
                raise ServiceFailed(text, status=500)
        except ValueError:
            raise ServiceFailed(f"a line must have at most {MAX_LINE_BYTES} bytes", 413) from None
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
    """Return a value as JSON; bytes become an object with their base64."""

    def default(value: Any) -> Any:
        if isinstance(value, bytes | bytearray | memoryview):
            return {"base64": base64.b64encode(value).decode()}
        return str(value)

    return json.dumps(value, ensure_ascii=False, default=default)


async def _write_request(process: Process, request: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(request)
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # a program need not read its request


async def _read_last_error(process: Process) -> str:
    """Read stderr to its end. Returns its last line."""
    assert process.stderr is not None
    kept = b""
    while data := await process.stderr.read(KEPT_STDERR_BYTES):
        kept = (kept + data)[-KEPT_STDERR_BYTES:]
    lines = kept.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


async def _terminate(process: Process) -> None:
    """End the process group: children may outlive the program."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(process, number)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
                while _signal(process, 0):  # noqa: ASYNC110  there is no event for an empty group
                    await asyncio.sleep(POLL_S)
                return
        except TimeoutError:
            pass


def _signal(process: Process, number: int) -> bool:
    """Signal the process group, whose id is the pid. Returns False if it is empty."""
    try:
        os.killpg(process.pid, number)
    except OSError:
        return False
    return True
