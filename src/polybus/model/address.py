"""Addresses of listeners and peers.

    tcp://127.0.0.1:6567     tls://bus.example:6567     tls+tcp://[::1]:6569
    grpc://127.0.0.1:6570    http://127.0.0.1:6580      (and grpc+tls, https)
    unix:/run/polybus/admin.sock                        ipc:///run/polybus/gsb.sock

An address is a scheme with either host and port, or a path. Parsing does no I/O: it
resolves no name and reads no file. Port 0 means any free port. Whether an address is
loopback is decided by its text alone, and if unsure it is not, because a listener beyond
loopback must use TLS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_address

from polybus.errors import AddressError

# scheme → whether it uses TLS
HOST_SCHEMES = {
    "tcp": False,
    "tls": True,
    "tls+tcp": True,
    "grpc": False,
    "grpc+tls": True,
    "http": False,
    "https": True,
}
PATH_SCHEMES = ("unix", "ipc")

MAX_PORT = 65535
# sockaddr_un has 108 bytes on Linux, with the terminating NUL.
MAX_UNIX_PATH_BYTES = 107

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")


@dataclass(frozen=True, slots=True)
class Address:
    """One address. Host and port for the network schemes, a path for `unix` and `ipc`.

    `options` are those of a listener (server/listener_plan.py). They are not part of the text:
    a client connects to the same address.
    """

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address. Raises AddressError with the reason."""
        scheme, colon, rest = text.partition(":")
        if not colon:
            likely = "unix:" if "/" in text else "tcp://"
            raise AddressError(f"address {text!r} has no scheme: write for example {likely}{text}")
        if scheme in PATH_SCHEMES:
            return cls(scheme, path=_path(text, rest))
        if scheme in HOST_SCHEMES:
            host, port = _host_and_port(text, rest)
            return cls(scheme, host, port)
        known = ", ".join([*HOST_SCHEMES, *PATH_SCHEMES])
        raise AddressError(
            f"address {text!r} has an unknown scheme {scheme!r}: it is one of {known}"
        )

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.path}"
        if self.scheme == "ipc":
            return f"ipc://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def is_unix(self) -> bool:
        return self.scheme in PATH_SCHEMES

    @property
    def is_encrypted(self) -> bool:
        return HOST_SCHEMES.get(self.scheme, False)

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach the address."""
        if self.is_unix or self.host == "localhost":
            return True
        ip = _ip(self.host)
        if isinstance(ip, IPv6Address) and ip.ipv4_mapped:
            ip = ip.ipv4_mapped
        return ip is not None and ip.is_loopback

    def with_port(self, port: int) -> Address:
        """Return the address with the bound port."""
        return replace(self, port=port)


def _path(text: str, rest: str) -> str:
    path = rest.removeprefix("//")
    if not path:
        raise AddressError(f"address {text!r} has no path: write for example unix:/tmp/bus.sock")
    if path.startswith("@") or "\0" in path:
        # The abstract namespace has no file modes, so anyone on the host could take the name.
        raise AddressError(
            f"address {text!r} must be a file path: abstract sockets are not supported"
        )
    size = len(path.encode("utf-8", errors="surrogateescape"))
    if size > MAX_UNIX_PATH_BYTES:
        raise AddressError(
            f"address {text!r} is too long: the path of a Unix socket has at most "
            f"{MAX_UNIX_PATH_BYTES} bytes, this one {size}"
        )
    return path


def _host_and_port(text: str, rest: str) -> tuple[str, int]:
    if not rest.startswith("//"):
        raise AddressError(f"address {text!r} lacks '//' after its scheme")
    place, slash, tail = rest[2:].partition("/")
    if tail:
        raise AddressError(f"address {text!r} takes no path after the port: drop {slash + tail!r}")
    if place.startswith("["):
        host, bracket, port = place[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise AddressError(f"address {text!r} has an unfinished [IPv6] host")
        if not isinstance(_ip(host), IPv6Address):
            raise AddressError(f"address {text!r}: {host!r} is not an IPv6 address")
        return host, _port(text, port[1:])
    host, _, port = place.partition(":")
    if ":" in port:
        raise AddressError(f"address {text!r}: an IPv6 host is written in brackets, as in [::1]")
    if not host:
        raise AddressError(f"address {text!r} has no host")
    if host == "*":
        raise AddressError(f"address {text!r}: for all interfaces write 0.0.0.0 or [::], not '*'")
    if not _HOST_NAME.fullmatch(host):
        raise AddressError(f"address {text!r} has an impossible host {host!r}")
    return host, _port(text, port)


def _port(text: str, port: str) -> int:
    if not port:
        raise AddressError(f"address {text!r} has no port (0 picks a free one)")
    if not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > MAX_PORT:
        raise AddressError(f"address {text!r}: port {port!r} is not a number from 0 to {MAX_PORT}")
    return int(port)


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
