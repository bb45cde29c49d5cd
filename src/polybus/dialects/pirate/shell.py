"""The shell of `polybus pirate`, on a terminal and for scripts: a line is a command.

    SUB <topic>             OK <id after which reading starts>
    UNSUB <topic>           OK 1, or OK 0 if there was no subscription
    PUT <topic> <data>      OK <id>
    PUT <topic> @file…      OK <id> <id> …; each file is a message; @@x is the text @x
    GET <topic>             MSG <id> <body> for each unread message, then NONE
    GET <topic> *           the same
    GET <topic> 1           MSG <id> <body>, or NONE
    RESUME                  OK and the outcome of the pending request
    FORGET                  OK and the fate of the pending request
    HELP, QUIT              OK …

An error is a line that begins with ERROR. A body is printed with \\\\ for a backslash and
\\n, \\xff … for unprintable bytes, so it is one line and can be parsed back.

Answers go to stdout and are flushed before the next command is read. Notices go to stderr. On a
terminal, lines can be edited and the history is in the state folder.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from polybus.cli.exit_status import exit_code
from polybus.dialects.pirate import codec
from polybus.dialects.pirate.client import pirate_blocking
from polybus.dialects.pirate.client.journal_state import Outcome, unknown_outcome_notice
from polybus.dialects.pirate.client.pirate_blocking import BlockingClient
from polybus.dialects.pirate.client.pirate_options import Order
from polybus.dialects.pirate.client.requester import Fate
from polybus.dialects.pirate.client_id import format_client_id
from polybus.errors import Fenced, PolybusError, Refused, UsageError, error_from_code

USAGE: Final = {
    "SUB": "SUB <topic>",
    "UNSUB": "UNSUB <topic>",
    "PUT": "PUT <topic> <data> (or @file…; @@x is the text @x)",
    "GET": "GET <topic> [1]",
    "RESUME": "RESUME",
    "FORGET": "FORGET",
    "HELP": "HELP",
    "QUIT": "QUIT",
}
ESCAPES: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
NOTHING: Final = "OK no request is pending"
FATE_TEXTS: Final = {
    Fate.USED: "used: the bus has executed or refused it",
    Fate.NEVER: "never: it was not executed and never will be",
    Fate.UNKNOWN: "unknown: the bus has continued without this state folder",
}
PROMPT: Final = "pirate> "
HISTORY: Final = "history"
HISTORY_LINES: Final = 1000
# The longest PUT that can succeed, with its verb and topic.
MAX_LINE_BYTES: Final = (64 << 20) + 1024


class Quit(Exception):
    """QUIT was typed."""


class Shell:
    """Executes lines. `show` must print an answer before it returns."""

    def __init__(self, client: BlockingClient, order: Order, show: Callable[[str], None]) -> None:
        self._client = client
        self._order = order
        self._show = show
        # The error of the first failed command, which is the exit code of a script.
        self.failed: PolybusError | None = None

    def run(self, line: str) -> None:
        """Execute one line. Raises `Quit` or `Fenced` to end the shell."""
        if not line.strip():
            return
        try:
            self._execute(line)
        except PolybusError as error:
            self.failed = self.failed or error
            text = "".join(map(_escaped, str(error)))
            self._show("ERROR " + " ".join(text.split()))
            if isinstance(error, Fenced):
                raise

    def _execute(self, line: str) -> None:
        verb, _, rest = line.removesuffix("\n").removesuffix("\r").lstrip().partition(" ")
        verb = verb.upper()
        if verb not in USAGE:
            raise UsageError(f"unknown command {verb}: expected {' | '.join(USAGE)}")
        method = getattr(self, f"_{verb.lower()}")
        if verb in ("RESUME", "FORGET", "HELP", "QUIT"):
            _check(not rest.strip(), verb)
            method()
            return
        topic, _, data = rest.lstrip().partition(" ")
        _check(bool(topic), verb)
        method(topic, data)

    # --- the commands

    def _sub(self, topic: str, more: str) -> None:
        _check(not more.strip(), "SUB")
        self._show(f"OK {self._client.subscribe(topic)}")

    def _unsub(self, topic: str, more: str) -> None:
        _check(not more.strip(), "UNSUB")
        self._show(f"OK {int(self._client.unsubscribe(topic))}")

    def _put(self, topic: str, data: str) -> None:
        _check(bool(data), "PUT")
        if not data.startswith("@") or data.startswith("@@"):
            text = data.removeprefix("@")  # @@x is the text @x
            self._show(f"OK {self._client.put(topic, text.encode('utf-8', 'surrogateescape'))}")
            return
        ids: list[str] = []
        for path in _files(data):
            try:
                # One byte more than the largest message is enough for `put` to refuse it.
                with path.open("rb") as file:
                    body = file.read(codec.MAX_MESSAGE_BYTES + 1)
                ids.append(str(self._client.put(topic, body)))
            except OSError as error:
                before = f"after {' '.join(ids)}: " if ids else ""
                text = f"{before}{path}: {error.strerror or str(error)}"
                raise UsageError(text) from None
            except PolybusError as error:
                before = f"after {' '.join(ids)}: " if ids else ""
                raise error_from_code(error.code, f"{before}{path}: {error}") from error
        self._show(f"OK {' '.join(ids)}")

    def _get(self, topic: str, more: str) -> None:
        _check(more.strip() in ("", "*", "1"), "GET")
        while True:
            message = self._client.get(topic, order=self._order)
            if message is None:
                self._show("NONE")
                return
            self._show(f"MSG {message.id} {printable_body(message.body)}")
            # Printed and flushed: after a crash here the message is printed again.
            if self._order is Order.DELIVER_THEN_RECORD:
                self._client.record(message)
            if more.strip() == "1":
                return

    def _resume(self) -> None:
        outcome = self._client.resume()
        if outcome is not None and outcome.error:
            raise Refused(_describe_outcome(outcome))
        self._show(NOTHING if outcome is None else f"OK {_describe_outcome(outcome)}")

    def _forget(self) -> None:
        fate = self._client.forget()
        self._show(NOTHING if fate is None else f"OK {FATE_TEXTS[fate]}")

    def _help(self) -> None:
        self._show("OK " + " | ".join(USAGE.values()))

    def _quit(self) -> None:
        self._show("OK")
        raise Quit


# --- parsing and printing


def _check(fits: bool, verb: str) -> None:
    if not fits:
        raise UsageError(f"usage: {USAGE[verb]}")


def _files(data: str) -> list[Path]:
    """Parse `@one @two`. Names with spaces must be quoted."""
    try:
        words = shlex.split(data)
    except ValueError as error:
        raise UsageError(f"{data}: {error}") from None
    for word in words:
        if not word.startswith("@") or word == "@":
            raise UsageError(f"{word!r} must be an @file; write @@ for a text that begins with @")
    return [Path(word.removeprefix("@")) for word in words]


def _describe_outcome(outcome: Outcome) -> str:
    ended = outcome.error or str(outcome.value)
    return f"{outcome.op} {outcome.topic} (counter {outcome.counter}): {ended}"


def printable_body(body: bytes) -> str:
    text = body.decode("utf-8", "surrogateescape")
    return "".join(map(_escaped, text.replace("\\", "\\\\")))


def _escaped(char: str) -> str:
    if char.isprintable():
        return char
    raw = char.encode("utf-8", "surrogateescape")
    return ESCAPES.get(char) or "".join(f"\\x{byte:02x}" for byte in raw)


def run(server: str, order: Order, **settings: Any) -> int:
    """Run the shell until its input ends. `settings` are those of `connect`.

    Returns the exit code.
    """
    with pirate_blocking.connect(server, on_notice=_note, **settings) as client:
        shell = Shell(client, order, _answer)
        if sys.stdin.isatty() and sys.stdout.isatty():
            return _on_terminal(shell, client)
        return _as_script(shell)


def _as_script(shell: Shell) -> int:
    with contextlib.suppress(Fenced, Quit):
        while line := sys.stdin.buffer.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise UsageError(f"a line must have at most {MAX_LINE_BYTES} bytes")
            shell.run(line.decode("utf-8", "surrogateescape"))
    return 0 if shell.failed is None else exit_code(shell.failed)


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


def _answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _note(text: str) -> None:
    _print_notice(f"NOTE {text}")


def _print_notice(text: str) -> None:
    with contextlib.suppress(OSError):
        print("polybus:", text, file=sys.stderr, flush=True)
