"""Which listeners a bus opens: from the settings to a checked list of addresses.

With no `listen` every dialect starts at its default; with any, only those that
are listed. The admin socket is always there: at its default, or where it is
listed. Everything is checked before anything is opened: the dialect, the
address, the scheme, and that nobody beyond this machine is served in plain text
without someone having asked for it.

`localhost` stands for two addresses, and a client may try either first. So it is
two listeners, on a host that has both; at port 0 each gets a port of its own.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path

from polybus.errors import AddressError, ConfigError
from polybus.model.address import Address
from polybus.server.config import DEFAULT, LoadedSettings
from polybus.server.dialect_registry import (
    ADMIN,
    ADMIN_DEFAULT,
    ADMIN_SCHEMES,
    DIALECTS,
    PIRATE,
    RUNTIME,
)
from polybus.server.settings import Settings

LOCALHOST = "localhost"
# How a dialect is encrypted, where that is no scheme of its address.
ENCRYPTED = {PIRATE: "set curve = true in [pirate]"}
LOOPBACKS = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}


@dataclass(frozen=True, slots=True)
class ListenerSpec:
    """One listener to open. `listed`: somebody asked for it, it is not a default."""

    dialect: str
    address: Address
    listed: bool


def plan_listeners(
    loaded: LoadedSettings, runtime: Path, admin: bool = True
) -> tuple[ListenerSpec, ...]:
    """The listeners to open, dialects first; `UsageError` if one cannot be."""
    source = loaded.sources.get("listen", DEFAULT)
    listed = [
        one for item in loaded.settings.listen for one in _expand_localhost(_parse(item, source))
    ]
    wanted = listed or _defaults(runtime)
    if admin and not any(one.dialect == ADMIN for one in wanted):
        wanted.append(ListenerSpec(ADMIN, _default(ADMIN_DEFAULT, runtime), listed=False))
    for one in wanted:
        _check(one, loaded.settings)
    _check_distinct(wanted)
    return tuple(wanted)


def _defaults(runtime: Path) -> list[ListenerSpec]:
    return [
        ListenerSpec(row.name, _default(text, runtime), listed=False)
        for row in DIALECTS.values()
        for text in row.defaults
    ]


def _default(text: str, runtime: Path) -> Address:
    return Address.parse(text.replace(RUNTIME, str(runtime.absolute())))


def _parse(item: str, source: str) -> ListenerSpec:
    name, equals, text = item.partition("=")
    if not equals:
        raise ConfigError(f"{source}: {item!r} is not DIALECT=ADDRESS")
    if name != ADMIN and name not in DIALECTS:
        known = ", ".join([*DIALECTS, ADMIN])
        raise ConfigError(f"{source}: unknown dialect {name!r}: this bus has {known}")
    try:
        address = Address.parse(text)
        if address.is_unix:  # so that what is printed is right in any folder
            address = Address.parse(f"{address.scheme}:{Path(address.path).absolute()}")
    except AddressError as error:
        raise AddressError(f"{source}: {name}: {error}") from None
    return ListenerSpec(name, address, listed=True)


def _expand_localhost(one: ListenerSpec) -> list[ListenerSpec]:
    if one.address.host != LOCALHOST:
        return [one]
    hosts = [host for host, family in LOOPBACKS.items() if _is_here(host, family)]
    addresses = [replace(one.address, host=host) for host in hosts or [LOCALHOST]]
    return [replace(one, address=address) for address in addresses]


def _is_here(host: str, family: socket.AddressFamily) -> bool:
    """Has this machine such an address? Containers often lack IPv6."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((host, 0))
    except OSError:
        return False
    return True


def _check(one: ListenerSpec, settings: Settings) -> None:
    schemes = ADMIN_SCHEMES if one.dialect == ADMIN else DIALECTS[one.dialect].schemes
    address = one.address
    if address.scheme not in schemes:
        raise ConfigError(
            f"{one.dialect} cannot listen on {address}: its schemes are {', '.join(schemes)}"
        )
    if address.is_encrypted and settings.tls.certificate is None:
        raise ConfigError(
            f"{one.dialect} on {address} needs a certificate: set certificate and key in [tls]"
        )
    if one.dialect == PIRATE and settings.pirate.curve:
        return
    if not (address.is_loopback or address.is_encrypted or settings.insecure):
        raise ConfigError(
            f"{one.dialect} on {address} could be reached by other machines, and nothing on it"
            f" is encrypted: {ENCRYPTED.get(one.dialect, 'use a tls scheme')}, or say"
            " insecure = true (--insecure)"
        )


def _check_distinct(wanted: list[ListenerSpec]) -> None:
    seen: dict[Address, str] = {}
    for one in wanted:
        if not one.address.is_unix and one.address.port == 0:
            continue
        if one.address in seen:
            raise ConfigError(
                f"{one.address} is asked for twice, by {seen[one.address]} and {one.dialect}"
            )
        seen[one.address] = one.dialect
