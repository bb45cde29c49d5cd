"""The listeners of a bus: from the settings to a checked list of addresses.

Without `listen` every installed dialect listens at its default addresses; with it, only the
listed ones. The admin socket is always open: at its default, or where it is listed. All
checks come before anything is opened: the dialect, the address, the scheme, and that other
machines are not served without encryption unless `insecure` is set.

`localhost` stands for two addresses, and a client may try either first. So it becomes two
listeners on a host that has both; at port 0 each gets its own port.

An address may end in options, `?NAME=VALUE&NAME=VALUE`: those that its dialect declares
(`Dialect.listen_options`). So the path of a listed socket must not contain `?`.

`DIALECT+FRAMING=ADDRESS` is a listener of a dialect's other framing (`Dialect.framings`).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path

from polybus.bus.dialect import FRAMING, RUNTIME
from polybus.bus.dialect_registry import installed_dialects
from polybus.errors import AddressError, ConfigError
from polybus.model.address import Address
from polybus.server.config import DEFAULT, LoadedSettings
from polybus.server.settings import Settings

# The admin socket is not a dialect, but it is configured and listed like one.
ADMIN = "admin"
ADMIN_DEFAULT = f"unix:{RUNTIME}/admin.sock"
ADMIN_SCHEMES = ("unix",)
LOCALHOST = "localhost"
LOOPBACKS = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}


@dataclass(frozen=True, slots=True)
class ListenerSpec:
    """One listener to open. `listed`: it is configured, not a default."""

    dialect: str
    address: Address
    listed: bool

    @property
    def framing(self) -> str:
        """Return the framing if it is not the usual one, else an empty text."""
        return dict(self.address.options).get(FRAMING, "")

    @property
    def name(self) -> str:
        """Return the name by which it is configured and listed."""
        return f"{self.dialect}+{self.framing}" if self.framing else self.dialect


def plan_listeners(
    loaded: LoadedSettings, runtime: Path, admin: bool = True
) -> tuple[ListenerSpec, ...]:
    """Return the listeners to open, dialects first. Raises `ConfigError` for an invalid one."""
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
        for row in installed_dialects().listening
        for text in row.default_addresses
    ]


def _default(text: str, runtime: Path) -> Address:
    return Address.parse(text.replace(RUNTIME, str(runtime.absolute())))


def _parse(item: str, source: str) -> ListenerSpec:
    listener, equals, text = item.partition("=")
    if not equals:
        raise ConfigError(f"{source}: {item!r} is not DIALECT=ADDRESS")
    known = [*installed_dialects().listener_names, ADMIN]
    if listener not in known:
        raise ConfigError(
            f"{source}: unknown dialect {listener!r}: this bus has {', '.join(known)}"
        )
    name, _, framing = listener.partition("+")
    text, _, options = text.partition("?")
    try:
        address = Address.parse(text)
        if address.is_unix:  # so that the printed address is valid in any folder
            address = Address.parse(f"{address.scheme}:{Path(address.path).absolute()}")
        chosen = ((FRAMING, framing),) if framing else ()
        address = replace(address, options=(*_parse_options(name, options), *chosen))
    except AddressError as error:
        raise AddressError(f"{source}: {listener}: {error}") from None
    return ListenerSpec(name, address, listed=True)


def _parse_options(name: str, text: str) -> tuple[tuple[str, str], ...]:
    """Parse the options of an address. Raises AddressError for one that the dialect lacks."""
    known = {} if name == ADMIN else installed_dialects()[name].listen_options
    options: dict[str, str] = {}
    for item in text.split("&") if text else ():
        option, _, value = item.partition("=")
        if option not in known:
            allowed = ", ".join(known) or "none"
            raise AddressError(f"option must be one of: {allowed}; got {option!r}")
        if option in options:
            raise AddressError(f"option {option!r} must be given once")
        if value not in known[option]:
            allowed = ", ".join(known[option])
            raise AddressError(f"option {option!r} must be one of: {allowed}; got {value!r}")
        options[option] = value
    return tuple(options.items())


def _expand_localhost(one: ListenerSpec) -> list[ListenerSpec]:
    if one.address.host != LOCALHOST:
        return [one]
    hosts = [host for host, family in LOOPBACKS.items() if _is_here(host, family)]
    addresses = [replace(one.address, host=host) for host in hosts or [LOCALHOST]]
    return [replace(one, address=address) for address in addresses]


def _is_here(host: str, family: socket.AddressFamily) -> bool:
    """Return True if this machine has the address. Containers often lack IPv6."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((host, 0))
    except OSError:
        return False
    return True


def _check(one: ListenerSpec, settings: Settings) -> None:
    dialect = None if one.dialect == ADMIN else installed_dialects()[one.dialect]
    schemes = ADMIN_SCHEMES if dialect is None else dialect.schemes
    if dialect is not None and one.framing:
        schemes = dialect.framings[one.framing]
    address = one.address
    if address.scheme not in schemes:
        raise ConfigError(
            f"{one.name} cannot listen on {address}: its schemes are {', '.join(schemes)}"
        )
    has_certificate = settings.tls.certificate is not None
    if address.is_encrypted and not has_certificate and not (dialect and dialect.makes_certificate):
        raise ConfigError(
            f"{one.name} on {address} needs a certificate: set certificate and key in [tls]"
        )
    if address.is_loopback or address.is_encrypted or settings.insecure or dialect is None:
        return
    # Some dialects encrypt by themselves, whatever the scheme.
    if dialect.is_encrypted is None or not dialect.is_encrypted(settings.section(dialect.name)):
        raise ConfigError(
            f"{one.name} on {address} could be reached by other machines, and nothing on it"
            f" is encrypted: {dialect.encryption_hint}, or say insecure = true (--insecure)"
        )


def _check_distinct(wanted: list[ListenerSpec]) -> None:
    seen: dict[str, str] = {}
    for one in wanted:
        if not one.address.is_unix and one.address.port == 0:
            continue
        place = str(one.address)  # without its options
        if place in seen:
            raise ConfigError(f"{place} is asked for twice, by {seen[place]} and {one.name}")
        seen[place] = one.name
