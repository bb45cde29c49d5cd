"""`polybus pirate`: its flags and commands; the shell itself is in pirate_shell.

Nothing heavy is loaded before the shell begins: `--help` is answered at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from polybus.dialects.pirate import subscriber_commands
from polybus.dialects.pirate.client.pirate_options import DEFAULT_SERVER, ClientOptions, Order

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
    subscriber_commands.register(group)
    root.add_typer(group, name=name, help=help_line, epilog=EXIT_CODES)


def pirate(
    context: typer.Context,
    server: Server = DEFAULT_SERVER,
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
    from polybus.dialects.pirate import shell_terminal

    return shell_terminal.run(
        server,
        order,
        id=client_id,
        state=state,
        curve=keys if keys is not None else curve,
        timeout_s=timeout_s,
        tries=tries,
        reread=reread,
    )
