"""The description by which a dialect registers itself, and the parts of a bus that it may use.

A distribution names a `Dialect` under the entry-point group `polybus.dialects`:

    [project.entry-points."polybus.dialects"]
    rqueue = "polybus.dialects.rqueue.rqueue_dialect:DIALECT"

The built-in dialects and the native port register in the same way as a third party's. The
module of a description is imported by `polybus --help`, so it imports its server side, its
client and its commands only inside functions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

    from polybus.bus.admin_verb import AdminVerb
    from polybus.bus.broker import Broker
    from polybus.bus.connection import ConnectionIO
    from polybus.model.address import Address
    from polybus.model.identity import Identity
    from polybus.model.topic import Bounds, Topic
    from polybus.store.contract import Store

T = TypeVar("T")
# In a default address: the folder of the sockets of this user's bus.
RUNTIME = "<runtime>"
# The option of an address that holds the framing of its listener, if that is not the usual one.
FRAMING = "framing"


class DialectListener(Protocol):
    """One open address of a dialect."""

    @property
    def address(self) -> Address: ...

    def close(self) -> None:
        """Accept no more connections. May be called more than once."""

    async def drain(self, timeout_s: float) -> None:
        """Wait until pending output has been sent, then end all connections."""


class DialectServer(Protocol):
    """The server side of one dialect in a running bus: one object for all its addresses."""

    async def listen(self, address: Address) -> DialectListener: ...

    async def reload(self) -> None:
        """Read files again (SIGHUP). Raises `ConfigError` and changes nothing if one is invalid."""

    def stop(self) -> None:
        """Release waiting requests, before connections are drained."""

    async def close(self) -> None:
        """Release everything, after the last connection has ended."""


class ConnectionCount(Protocol):
    """The bound on the connections of all dialects together."""

    def enter(self, peer: str, identity: Identity) -> bool:
        """Count one connection. Returns False if the bound or the caller's share is reached."""

    def leave(self, identity: Identity) -> None:
        """Uncount a connection; `identity` is the one that it entered with."""


class RunBlocking(Protocol):
    """Runs work on another thread, then passes its future to `then` on the loop."""

    def __call__(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None: ...


class RunOnLoop(Protocol):
    """Runs a function on the loop for another thread. Returns its result or raises its error."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> T: ...


class DialectDialler(Protocol):
    """Opens connections to other machines, for sessions of a dialect."""

    async def dial(self, address: Address) -> ConnectionIO:
        """Connect. Raises OSError. The session is opened when the TLS handshake is done."""

    async def wait_ended(self) -> None:
        """Wait until all its connections have ended."""

    async def drain(self, timeout_s: float) -> None: ...


class StreamDialectServer(DialectServer, Protocol):
    """A `DialectServer` whose sessions read a byte stream."""

    def dialler(self, open_session: Callable[[Any], Any]) -> DialectDialler: ...

    def forget(self, dialler: Any) -> None:
        """Release a dialler whose connections have ended."""


class ServeStreams(Protocol):
    """Serves a dialect whose sessions read a byte stream (TCP, TLS or Unix).

    `charge_user` charges each connection to its user's quota_connections. Encrypted listeners
    use `certificate` and its key, both PEM, if [tls] has none.
    """

    def __call__(
        self,
        open_session: Callable[[ConnectionIO], Any],
        *,
        charge_user: bool = False,
        certificate: tuple[bytes, bytes] | None = None,
    ) -> StreamDialectServer: ...


class TlsFiles(Protocol):
    """The certificate of the encrypted listeners."""

    @property
    def certificate(self) -> Path | None: ...
    @property
    def key(self) -> Path | None: ...


@dataclass(slots=True)
class ServerContext:
    """The parts of a running bus that the server side of one dialect may use."""

    broker: Broker
    section: Any  # the dialect's own settings: an instance of `Dialect.limits`
    tls: TlsFiles
    log: Any
    data: Path | None  # the data folder; None if nothing is stored
    connections: ConnectionCount
    serve_streams: ServeStreams
    # Returns the options of stream listeners that the dialect opens itself, whose connections
    # have a bound of their own: (its setting in error texts and counters, the bound).
    own_places: Callable[[str, int], Any]
    stats: Callable[[], dict[str, Any]]
    rule_verbs: Mapping[str, AdminVerb]  # the admin verbs that read and change access rules
    on_fault: Callable[[BaseException], None]
    # Of a bus with a store; set before `attach_store` is called.
    call_on_loop: Callable[[Callable[[], None]], None] | None = None
    run_on_loop: RunOnLoop | None = None
    workers: RunBlocking | None = None
    attached: Any = None  # the value that the dialect's `attach_store` returned


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `polybus`: `module` has a function `register(root, name, help_line)`."""

    name: str
    module: str
    help_line: str


@dataclass(frozen=True, slots=True)
class ServeFlag:
    """A repeatable flag of `polybus serve` that sets one key of the dialect's section."""

    name: str  # as in --link
    key: str
    metavar: str
    help_line: str


# Why two settings contradict each other: the key in the dialect's section, the rule for it,
# its value, and the bound that the rule names.
Contradiction = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A dialect. Only the name is required; each hook may be left out."""

    name: str
    default_addresses: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    # Options of its listeners, `freud=unix:/path?length=with-header`: the values of each, the
    # default first. `DialectServer.listen` finds those that were given in `Address.options`.
    listen_options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Other framings, each with listeners of its own, `gsb+ya=tcp://…`, and the schemes of each.
    # `DialectServer.listen` finds the framing in `Address.options`, under FRAMING.
    framings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The class of the section `[name]` of the settings, and the bounds of its keys.
    limits: type | None = None
    # Flags of `polybus serve` for keys of that section.
    serve_flags: tuple[ServeFlag, ...] = ()
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # The client's import path, for people who look for it.
    client: str = ""
    commands: tuple[Command, ...] = ()
    open_server: Callable[[ServerContext], Awaitable[DialectServer]] | None = None
    # Called for every installed dialect of a bus with a store, whether or not it listens:
    # records of a dialect may hold back the collection of messages.
    attach_store: Callable[[ServerContext], Awaitable[Any]] | None = None
    admin_verbs: Callable[[ServerContext], Mapping[str, AdminVerb]] | None = None
    # Checks that need more than one value (section, limits of the bus), or files (section, data).
    check_settings: Callable[[Any, Any], Contradiction | None] | None = None
    check_files: Callable[[Any, Path], None] | None = None
    # Encryption that is not a scheme of the address: is it on, and how to turn it on.
    is_encrypted: Callable[[Any], bool] | None = None
    # Descriptors of each connection to a plain and to an encrypted listener. Such a dialect counts
    # its connections apart from all others, up to `max_connections` of its section.
    descriptors_per_connection: tuple[int, int] | None = None
    # Its transport accepts connections until no descriptor is left, and the bus cannot prevent it.
    may_take_all_descriptors: bool = False
    # Its encrypted listeners have a certificate of their own if [tls] has none.
    makes_certificate: bool = False
    encryption_hint: str = "use a tls scheme"
    # The subscribers of a durable topic that this dialect has stored, for `topic.stats`.
    read_subscribers: Callable[[Store, Topic, Bounds], Sequence[Mapping[str, Any]]] | None = None
    # Prefixes of producer names that only this dialect may open, and their owner in error texts.
    reserved_producers: Mapping[str, str] = field(default_factory=dict)
    # Topics that only the bus itself writes, and their purpose in error texts. They are reserved
    # on every bus, also while the dialect does not write them, so that no client takes the name.
    reserved_topics: Mapping[str, str] = field(default_factory=dict)
