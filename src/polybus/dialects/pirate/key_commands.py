"""`polybus keys new|ls|allow|revoke`: CURVE keys of pirate's clients, and whom a bus lets in.

polybus keys new client                      # on the client's machine
polybus keys allow client.key --name alice   # on the bus's, with the public file
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from polybus.cli import flags
from polybus.cli.text_table import print_table
from polybus.dialects.pirate.client.client_keys import keys_folder
from polybus.dialects.pirate.server import curve_key_folder
from polybus.dialects.pirate.server.curve_key_folder import PUBLIC, AllowedKey, CurveKeyFolder
from polybus.server.config import Flag, load
from polybus.server.program import locate_curve_keys

Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="The data folder of the bus.")
]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    group.command("new", help="Make a client's pair of keys, a public and a secret file.")(new)
    group.command("ls", help="List whom a bus lets in, and its own public key.")(ls)
    group.command("allow", help="Let a key in: a public file, or the key itself.")(allow)
    group.command("revoke", help="Shut a key out, by name, fingerprint or key.")(revoke)
    root.add_typer(group, name=name, help=help_line)


def new(
    name: Annotated[str, typer.Argument(help="Of the files.")] = "client",
    folder: Annotated[
        Path | None, typer.Option("--keys", metavar="DIR", help="Where; else the client's own.")
    ] = None,
) -> None:
    public, secret = curve_key_folder.make_pair(folder or keys_folder(os.environ), name)
    made = AllowedKey(name, curve_key_folder.read_public(public))
    print(f"secret key  {secret}")
    print(f"public key  {public}  {made.text}")
    print(f"client id   {made.fingerprint}")


def ls(config: flags.Config = None, data: Data = None, as_json: flags.Json = False) -> None:
    folder = _folder(config, data)
    found = folder.allowed()
    own = folder.own_public if folder.own_public.exists() else None
    if as_json:
        rows = [{"name": one.name, "client": one.fingerprint, "key": one.text} for one in found]
        print(json.dumps({"server": str(own) if own else None, "allowed": rows}, indent=2))
        return
    print(f"server key  {own or 'none yet: a bus with [pirate] curve = true makes it'}")
    if found:
        print_table(("name", "client id", "key"), [(o.name, o.fingerprint, o.text) for o in found])
    else:
        print("no key is let in")


def allow(
    key: Annotated[str, typer.Argument(metavar="FILE|KEY", help="A public key.")],
    name: Annotated[
        str | None, typer.Option("--name", help="It is key:NAME in rules; else the file's name.")
    ] = None,
    config: flags.Config = None,
    data: Data = None,
) -> None:
    path = Path(key)
    raw = curve_key_folder.read_public(path) if path.is_file() else curve_key_folder.parse_key(key)
    called = name or (path.name.removesuffix(PUBLIC) if path.is_file() else "")
    if not called:
        raise typer.BadParameter("a key that is no file needs a --name")
    let_in = _folder(config, data).allow(raw, called)
    print(f"allowed: {let_in.name}, client {let_in.fingerprint}")


def revoke(
    which: Annotated[str, typer.Argument(metavar="NAME|FINGERPRINT|KEY")],
    config: flags.Config = None,
    data: Data = None,
) -> None:
    gone = _folder(config, data).revoke(which)
    print(f"revoked: {gone.name}, client {gone.fingerprint}")


def _folder(config: Path | None, data: Path | None) -> CurveKeyFolder:
    given = {"data": Flag("--data", data and str(data))}
    return CurveKeyFolder(locate_curve_keys(load(config, os.environ, given), os.environ))
