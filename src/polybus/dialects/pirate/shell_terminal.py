"""The shell of `polybus pirate`, on a terminal and as a script.

Answers go to stdout, one line each, and are out before the next command is read; words for
people (notices, the greeting) go to stderr. On a terminal lines can be edited, and the
history is kept in the state folder.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from polybus.cli.exit_status import exit_code
from polybus.dialects.pirate.client import pirate_blocking
from polybus.dialects.pirate.client.notices import unknown_outcome_notice
from polybus.dialects.pirate.client.pirate_blocking import BlockingClient
from polybus.dialects.pirate.client.pirate_options import Order
from polybus.dialects.pirate.client_id import format_client_id
from polybus.dialects.pirate.shell import Quit, Shell
from polybus.errors import Fenced, UsageError

PROMPT: Final = "pirate> "
HISTORY: Final = "history"
HISTORY_LINES: Final = 1000
# The longest PUT that can succeed, and the words before it.
MAX_LINE_BYTES: Final = (64 << 20) + 1024


def run(server: str, order: Order, **settings: Any) -> int:
    """Until its input ends; the exit code. The settings are those of `connect`."""
    interact = _on_terminal if sys.stdin.isatty() and sys.stdout.isatty() else _as_script
    with pirate_blocking.connect(server, on_notice=_note, **settings) as client:
        return interact(Shell(client, order, _answer), client)


# --- as a script


def _as_script(shell: Shell, client: BlockingClient) -> int:
    with contextlib.suppress(Fenced, Quit):
        for line in _lines():
            shell.run(line)
    return 0 if shell.failed is None else exit_code(shell.failed)


def _lines() -> Iterator[str]:
    while line := sys.stdin.buffer.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise UsageError(f"a line has at most {MAX_LINE_BYTES} bytes")
        yield line.decode("utf-8", "surrogateescape")


# --- on a terminal


def _on_terminal(shell: Shell, client: BlockingClient) -> int:
    _print_notice(
        f"client {format_client_id(client.id)} at {client.server}; HELP lists the commands"
    )
    with _history(client.folder / HISTORY), contextlib.suppress(EOFError, Quit):
        while True:
            try:
                shell.run(input(PROMPT))
            except KeyboardInterrupt:
                print()
                if client.pending is not None:
                    _note(unknown_outcome_notice(client.pending))
            except Fenced as error:
                return exit_code(error)
    return 0


@contextlib.contextmanager
def _history(path: Path) -> Iterator[None]:
    import readline

    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)
            path.chmod(0o600)


# --- words


def _answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _note(text: str) -> None:
    _print_notice(f"NOTE {text}")


def _print_notice(text: str) -> None:
    with contextlib.suppress(OSError):
        print("polybus:", text, file=sys.stderr, flush=True)
