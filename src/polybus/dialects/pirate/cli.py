"""`polybus pirate` and `polybus keys`: flags and commands. The shell itself is in shell.py.

    polybus pirate                               # the shell
    polybus pirate subs | drop CLIENT            # subscriptions of a running bus
    polybus pirate clients ls | rm CLIENT        # clients that ever sent HELLO
    polybus keys new client                      # on the client's machine
    polybus keys allow client.key --name alice   # on the bus's machine, with the public file

ZeroMQ and the client are imported when a command runs, so that `--help` is fast.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from polybus.cli import flags
from polybus.cli.text_table import print_table
from polybus.dialects.pirate.client.pirate_options import DEFAULT_SERVER, ClientOptions, Order

if TYPE_CHECKING:
    from polybus.dialects.pirate.server.curve_key_folder import CurveKeyFolder

DEFAULTS: Final = ClientOptions()
EXIT_CODES: Final = """\b
Exit codes, of the first command that failed (on a terminal: of the error that ended the shell):
  0   all commands were answered
  2   wrong argument or command, or the state folder is in use by another client
  3   no bus answers, or the outcome of a request is unknown
  4   the bus refused: no such topic, not subscribed, not allowed, fenced by another client
  5   the peer is not a bus
  1   a defect of polybus, or the reader of the output has closed it
  130 Ctrl-C
"""
COLUMNS: Final = ("topic", "client", "last", "behind", "seen_s", "user")
CLIENT_COLUMNS: Final = ("client", "user", "epoch", "counter", "subscriptions")

Server = Annotated[str, typer.Option("--server", metavar="URL", help="Address of the bus.")]
Id = Annotated[
    str | None,
    typer.Option("--id", metavar="ID", help="Client id instead of a random one; hex:… for bytes."),
]
StateFolder = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="State folder; default: one per server and id."),
]
Curve = Annotated[bool, typer.Option("--curve", help="Use the CURVE keys in --keys.")]
KeysFolder = Annotated[
    Path | None,
    typer.Option("--keys", metavar="DIR", help="Folder of client.key_secret and server.key."),
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Of each try.")]
Tries = Annotated[
    int, typer.Option("--tries", metavar="N", help="Tries of a request before it fails.")
]
Reading = Annotated[
    Order,
    typer.Option("--order", help="Of GET: record the position before or after delivery."),
]
Reread = Annotated[
    bool,
    typer.Option("--reread", help="After a restore of the bus: read from its positions."),
]
Topic = Annotated[str | None, typer.Option("--topic", help="Only subscriptions to this topic.")]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="The data folder of the bus.")
]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    """Add the command group `name` ("pirate" or "keys") to the `polybus` command."""
    if name == "keys":
        keys = typer.Typer()
        keys.command("new", help="Create a client's key pair: a public and a secret file.")(new)
        keys.command("ls", help="List the allowed keys of a bus, and its own public key.")(ls)
        text = "Allow a key, given as a public file or as the key itself."
        keys.command("allow", help=text)(allow)
        keys.command("revoke", help="Revoke a key, by name, fingerprint or key.")(revoke)
        root.add_typer(keys, name=name, help=help_line)
        return
    group = typer.Typer(invoke_without_command=True)
    group.callback()(pirate)
    group.command("subs", help="List subscriptions and their read positions.")(subs)
    group.command("drop", help="End the subscriptions of a client that will not return.")(drop)
    clients = typer.Typer()
    clients.command("ls", help="List the clients that count against max_clients.")(clients_ls)
    text = "Remove clients that will not return, with their subscriptions."
    clients.command("rm", help=text)(clients_rm)
    group.add_typer(clients, name="clients", help="Clients of a running bus: list, remove.")
    root.add_typer(group, name=name, help=help_line, epilog=EXIT_CODES)


# --- polybus pirate


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
    from polybus.dialects.pirate import shell

    return shell.run(
        server,
        order,
        id=client_id,
        state=state,
        curve=keys if keys is not None else curve,
        timeout_s=timeout_s,
        tries=tries,
        reread=reread,
    )


def subs(
    client: Annotated[
        str | None, typer.Argument(metavar="CLIENT", help="Only subscriptions of this client.")
    ] = None,
    topic: Topic = None,
    as_json: flags.Json = False,
    admin: flags.Admin = None,
) -> None:
    from polybus.cli.admin_request import ask_admin
    from polybus.dialects.pirate.client_id import format_client_id

    rows = ask_admin("pirate_subs", admin, **_selection(client, topic))
    for row in rows:
        row["client"] = format_client_id(bytes.fromhex(row["client"]))
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print_table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
    else:
        print("no subscriptions")


def drop(
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="Its id, as subs prints it.")],
    topic: Topic = None,
    admin: flags.Admin = None,
) -> None:
    from polybus.cli.admin_request import ask_admin

    response = ask_admin("pirate_drop", admin, **_selection(client, topic))
    print(f"dropped: {response['dropped']} subscriptions of {client}")


def clients_ls(
    user: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="Only clients of this user.")
    ] = None,
    as_json: flags.Json = False,
    admin: flags.Admin = None,
) -> None:
    from polybus.cli.admin_request import ask_admin_pages
    from polybus.dialects.pirate.client_id import format_client_id

    rows: list[dict[str, Any]] = ask_admin_pages("pirate_clients", "clients", admin)
    rows = [row for row in rows if user in (None, row["user"])]
    for row in rows:
        row["client"] = format_client_id(bytes.fromhex(row["client"]))
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print_table(CLIENT_COLUMNS, [[row[name] for name in CLIENT_COLUMNS] for row in rows])
    else:
        print("no clients")


def clients_rm(
    clients: Annotated[
        list[str], typer.Argument(metavar="CLIENT...", help="Their ids, as clients ls prints them.")
    ],
    admin: flags.Admin = None,
) -> None:
    from polybus.cli.admin_request import ask_admin

    for client in clients:
        response = ask_admin("pirate_client_rm", admin, **_selection(client, None))
        print(f"removed: {client} with {response['subscriptions']} subscriptions")


def _selection(client: str | None, topic: str | None) -> dict[str, Any]:
    from polybus.dialects.pirate.client_id import parse_client_id

    selected = {} if client is None else {"client": parse_client_id(client).hex()}
    return selected if topic is None else {**selected, "topic": topic}


# --- polybus keys


def new(
    name: Annotated[str, typer.Argument(help="Base name of the two files.")] = "client",
    folder: Annotated[
        Path | None,
        typer.Option("--keys", metavar="DIR", help="Where; default: the client's key folder."),
    ] = None,
) -> None:
    from polybus.dialects.pirate.client.client_keys import keys_folder
    from polybus.dialects.pirate.server.curve_key_folder import AllowedKey, make_pair, read_public

    public, secret = make_pair(folder or keys_folder(os.environ), name)
    key = AllowedKey(name, read_public(public))
    print(f"secret key  {secret}")
    print(f"public key  {public}  {key.text}")
    print(f"client id   {key.fingerprint}")


def ls(config: flags.Config = None, data: Data = None, as_json: flags.Json = False) -> None:
    folder = _key_folder(config, data)
    allowed = folder.allowed()
    own = folder.own_public if folder.own_public.exists() else None
    if as_json:
        keys = [{"name": key.name, "client": key.fingerprint, "key": key.text} for key in allowed]
        print(json.dumps({"server": str(own) if own else None, "allowed": keys}, indent=2))
        return
    print(f"server key  {own or 'none yet: a bus with [pirate] curve = true creates it'}")
    if allowed:
        rows = [(key.name, key.fingerprint, key.text) for key in allowed]
        print_table(("name", "client id", "key"), rows)
    else:
        print("no key is allowed")


def allow(
    key: Annotated[str, typer.Argument(metavar="FILE|KEY", help="A public key.")],
    name: Annotated[
        str | None, typer.Option("--name", help="key:NAME in rules; default: the file's name.")
    ] = None,
    config: flags.Config = None,
    data: Data = None,
) -> None:
    from polybus.dialects.pirate.server.curve_key_folder import PUBLIC, parse_key, read_public

    path = Path(key)
    raw = read_public(path) if path.is_file() else parse_key(key)
    name = name or (path.name.removesuffix(PUBLIC) if path.is_file() else "")
    if not name:
        raise typer.BadParameter("a key that is not a file needs a --name")
    added = _key_folder(config, data).allow(raw, name)
    print(f"allowed: {added.name}, client {added.fingerprint}")


def revoke(
    which: Annotated[str, typer.Argument(metavar="NAME|FINGERPRINT|KEY")],
    config: flags.Config = None,
    data: Data = None,
) -> None:
    revoked = _key_folder(config, data).revoke(which)
    print(f"revoked: {revoked.name}, client {revoked.fingerprint}")


def _key_folder(config: Path | None, data: Path | None) -> CurveKeyFolder:
    from polybus.dialects.pirate.pirate_dialect import locate_keys
    from polybus.dialects.pirate.server.curve_key_folder import CurveKeyFolder
    from polybus.server.config import Flag, load
    from polybus.server.folders import data_folder

    given = {"data": Flag("--data", data and str(data))}
    settings = load(config, os.environ, given).settings
    data = settings.data or data_folder(os.environ, os.getuid())
    return CurveKeyFolder(locate_keys(settings.section("pirate"), data))
