"""`polybus pirate`: the shell, on a terminal and as a script.

Answers go to stdout, one line each, and are out before the next command is read; words for
people (notices, the greeting) go to stderr. On a terminal lines can be edited, and the
history is kept in the state folder.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from polybus.cli import pirate_subs
from polybus.cli.outcome import exit_code
from polybus.dialects.pirate import blocking
from polybus.dialects.pirate.advice import kept
from polybus.dialects.pirate.blocking import BlockingClient
from polybus.dialects.pirate.identity import shown
from polybus.dialects.pirate.options import SERVER, ClientOptions, Order
from polybus.dialects.pirate.shell import Quit, Shell
from polybus.errors import Fenced, UsageError

PROMPT: Final = "pirate> "
HISTORY: Final = "history"
HISTORY_LINES: Final = 1000
# The longest PUT that can succeed, and the words before it.
MAX_LINE_BYTES: Final = (64 << 20) + 1024
DEFAULTS: Final = ClientOptions()
EXIT_CODES: Final = """\b
Exit codes, of the first command that failed (on a terminal only of what ended the shell):
  0   all were answered
  2   a wrong argument or command, a state folder that another client has
  3   no bus answers; the outcome of a request is not known
  4   the bus refused: no such topic, not subscribed, not allowed, fenced by another client
  5   what answers there is no bus
  1   a defect of polybus, or whoever read the output has left
  130 Ctrl-C
"""

Server = Annotated[str, typer.Option("--server", metavar="URL", help="Where the bus is.")]
Id = Annotated[
    str | None,
    typer.Option("--id", metavar="ID", help="The client's id, if not a random one; hex:… too."),
]
StateFolder = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="Its state folder; else one by server and id."),
]
Curve = Annotated[bool, typer.Option("--curve", help="With the CURVE keys in --keys.")]
KeysFolder = Annotated[
    Path | None,
    typer.Option("--keys", metavar="DIR", help="client.key_secret and server.key are there."),
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Of each try.")]
Tries = Annotated[int, typer.Option("--tries", metavar="N", help="Before it is told.")]
Reading = Annotated[
    Order,
    typer.Option("--order", help="Of GET: what comes first, the message or its note."),
]
Reread = Annotated[
    bool, typer.Option("--reread", help="After a restored bus: read on from where it says.")
]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer(invoke_without_command=True)
    group.callback()(pirate)
    pirate_subs.register(group)
    root.add_typer(group, name=name, help=help_line, epilog=EXIT_CODES)


def pirate(
    context: typer.Context,
    server: Server = SERVER,
    client_id: Id = None,
    state: StateFolder = None,
    curve: Curve = False,
    keys: KeysFolder = None,
    timeout_s: Timeout = DEFAULTS.timeout_s,
    tries: Tries = DEFAULTS.tries,
    order: Reading = Order.DELIVER_THEN_RECORD,
    reread: Reread = False,
) -> int:
    if context.invoked_subcommand is not None:
        return 0
    client = blocking.connect(
        server,
        id=client_id,
        state=state,
        curve=keys if keys is not None else curve,
        timeout_s=timeout_s,
        tries=tries,
        reread=reread,
        on_notice=_note,
    )
    run = _on_terminal if sys.stdin.isatty() and sys.stdout.isatty() else _as_script
    with client:
        return run(Shell(client, order, _answer), client)


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
    _say(f"client {shown(client.id)} at {client.server}; HELP lists the commands")
    with _history(client.folder / HISTORY), contextlib.suppress(EOFError, Quit):
        while True:
            try:
                shell.run(input(PROMPT))
            except KeyboardInterrupt:
                print()
                if client.pending is not None:
                    _note(kept(client.pending))
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
    _say(f"NOTE {text}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print("polybus:", text, file=sys.stderr, flush=True)
