"""Names and numbers of the other end."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.model.identity import ANONYMOUS, IN_DOUBT, Identity
from polybus.transports import peer_identity, unix_credentials
from polybus.transports.peer_identity import (
    describe_peer,
    identify_peer,
    socket_table,
    unsent_bytes,
)
from polybus.transports.proc_net_table import ProcNetSocketTable, packed
from polybus.transports.socket_table import NetlinkSocketTable, SocketEnd, SocketTable
from polybus.transports.unix_credentials import service_of, unit_of
from tests.rig.observer import until

OTHER_UID = 4242
ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root can change its uid")
V4, V6, MAPPED = "127.0.0.1", "::1", "::ffff:127.0.0.1"


@pytest.mark.parametrize(
    ("peername", "name"),
    [
        (("127.0.0.1", 51234), "127.0.0.1:51234"),
        (("::1", 51234, 0, 0), "[::1]:51234"),
        (None, "gone"),
    ],
)
def test_tcp_peer_is_described_by_its_address(peername: object, name: str):
    assert describe_peer(peername, ANONYMOUS) == name


def test_unix_peer_is_described_by_its_process():
    assert describe_peer("", Identity(uid=5, gid=6, pid=7)) == "unix:pid=7,uid=5"


# --- Unix sockets


def test_unix_peer_has_credentials_of_the_kernel():
    near, far = socket.socketpair()
    with near, far:
        found = identify_peer(near)
    assert (found.uid, found.gid, found.pid) == (os.getuid(), os.getgid(), os.getpid())
    assert found.groups == frozenset(os.getgroups())
    assert found.service in (
        unit_of(Path("/proc/self/cgroup").read_text()),
        str(Path("/proc/self/exe").readlink()),
    )
    assert found.service


@contextlib.contextmanager
def calling(path: Path, setup: str) -> Iterator[socket.socket]:
    """The accepted end of a connection that another process, after `setup`, has made."""
    program = (
        f"import os, socket, sys\n{setup}\n"
        f"link = socket.socket(socket.AF_UNIX)\nlink.connect({str(path)!r})\nsys.stdin.read()\n"
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0o777)
        server.listen()
        server.settimeout(20)
        with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
            try:
                link, _ = server.accept()
                with link:
                    yield link
            finally:
                child.kill()


@ROOT_ONLY
@pytest.mark.parametrize("count", [0, 1, 64, 65, 256, 257, 3000])
def test_any_number_of_supplementary_groups(count: int, short_path: Path):
    setup = f"os.setgroups(range(70000, 70000 + {count})); os.setgid(4243); os.setuid({OTHER_UID})"
    with calling(short_path, setup) as link:
        found = identify_peer(link)
    assert (found.uid, found.gid) == (OTHER_UID, 4243)
    assert found.groups == frozenset(range(70000, 70000 + count))


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = Path(f"/tmp/pb-peer-{os.getpid()}")
    folder.mkdir(mode=0o755)
    yield folder / "s"
    (folder / "s").unlink(missing_ok=True)
    folder.rmdir()


def test_ended_process_has_no_service(short_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its pid may be reused."""
    monkeypatch.setattr(unix_credentials, "service_of", lambda pid: "another's")
    with calling(short_path, "") as link:
        found = identify_peer(link)
        assert found.service == "another's"
        assert found.pid is not None
        os.kill(found.pid, 9)
        until(lambda: identify_peer(link).service == "", "its service is forgotten")
        assert identify_peer(link).uid == os.getuid()


def test_pid_is_used_on_kernels_without_pidfd(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unix_credentials, "SO_PEERPIDFD", 9999)
    near, far = socket.socketpair()
    with near, far:
        assert identify_peer(near).service == service_of(os.getpid()) != ""


def test_groups_are_unknown_on_kernels_without_peergroups(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unix_credentials, "SO_PEERGROUPS", 9999)
    near, far = socket.socketpair()
    with near, far:
        assert identify_peer(near).groups is None


SYSTEM = "/system.slice/billing.service"
USER = "/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.service"


@pytest.mark.parametrize(
    ("cgroups", "unit"),
    [
        ("", ""),
        ("0::/\n", ""),
        (f"0::{SYSTEM}\n", "billing.service"),
        (f"0::{SYSTEM}/workers/7\n", "billing.service"),
        (f"0::{USER}\n", "app-x.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
        (f"0::{SYSTEM} (deleted)\n", "billing.service"),
        ("0::/system.slice/.service\n", ""),
        ("0::/system.slice/my.service.d/x\n", ""),
        (f"12:pids:/a.service\n1:name=systemd:{SYSTEM}\n0::/\n", "billing.service"),
        (f"12:pids:{SYSTEM}\n1:name=systemd:/\n0::/\n", ""),
        (f"0::{SYSTEM}\n1:name=systemd:/other.service\n", "billing.service"),
        ("0::/a:b.service\n", "a:b.service"),
        ("garbage\n:::\n", ""),
    ],
)
def test_the_service_is_the_innermost_unit(cgroups: str, unit: str):
    assert unit_of(cgroups) == unit


def test_without_a_unit_the_service_is_the_executable(tmp_path: Path):
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "exe").symlink_to("/usr/bin/thing")
    assert service_of(7, str(tmp_path)) == "/usr/bin/thing"
    (folder / "cgroup").write_text(f"0::{SYSTEM}\n")
    assert service_of(7, str(tmp_path)) == "billing.service"
    (folder / "cgroup").write_bytes(b"0::/\xff\n")
    (folder / "exe").unlink()
    assert service_of(7, str(tmp_path)) == ""
    assert service_of(8, str(tmp_path)) == ""


# --- TCP


@contextlib.contextmanager
def connected(
    host: str = V4, far_host: str | None = None
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection: ours, accepted, and the peer's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as server:
        target = far_host or host
        far = socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET)
        far.connect((target, server.getsockname()[1]))
        near, _ = server.accept()
        with near, far:
            yield near, far


TABLES = [
    pytest.param(NetlinkSocketTable, id="sockdiag"),
    pytest.param(ProcNetSocketTable, id="procnet"),
]


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SocketTable]:
    """Each way to the socket table, as the one in use."""
    made = request.param()
    monkeypatch.setattr(peer_identity, "socket_table", lambda: made)
    yield made
    if isinstance(made, NetlinkSocketTable):
        made.close()


def test_netlink_is_available():
    assert isinstance(socket_table(), NetlinkSocketTable)


@pytest.mark.parametrize(
    ("host", "far_host"),
    [(V4, V4), ("127.1.2.3", "127.1.2.3"), (V6, V6), ("::", V4), ("::", V6), ("::", MAPPED)],
)
def test_socket_table_returns_the_uid_of_a_loopback_peer(table, host: str, far_host: str):
    with connected(host, far_host) as (near, _):
        assert identify_peer(near) == Identity(uid=os.getuid())


@ROOT_ONLY
@pytest.mark.parametrize(("host", "far_host"), [(V4, V4), (V6, V6), ("::", MAPPED)])
def test_owner_is_the_uid_in_the_socket_table(table, host: str, far_host: str):
    with connected(host, far_host) as (near, far):
        os.fchown(far.fileno(), OTHER_UID, -1)  # as if another user had made it
        assert identify_peer(near) == Identity(uid=OTHER_UID)
        os.fchown(near.fileno(), OTHER_UID + 1, -1)  # our own end does not matter
        assert identify_peer(near) == Identity(uid=OTHER_UID)


@pytest.mark.parametrize(("host", "far_host"), [(V4, V4), (V6, V6), ("::", MAPPED)])
def test_closed_peer_is_in_doubt_and_not_root(table, host: str, far_host: str):
    """The kernel's table has uid 0 for a socket that no process holds."""
    with connected(host, far_host) as (near, far):
        far.close()
        assert identify_peer(near) == IN_DOUBT


def own_address() -> str:
    """Return an address of this machine that is not a loopback one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no other address")
        name: str = probe.getsockname()[0]
        return name


@pytest.mark.parametrize("from_own", [True, False])
@pytest.mark.parametrize("to_own", [True, False])
def test_peer_is_identified_whichever_own_address_it_uses(table, from_own: bool, to_own: bool):
    """A user must not become anonymous by choosing another address of this machine."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        target = (own_address() if to_own else V4, server.getsockname()[1])
        source = (own_address() if from_own else V4, 0)
        far = socket.create_connection(target, timeout=20, source_address=source)
        near, _ = server.accept()
        with near, far:
            assert identify_peer(near) == Identity(uid=os.getuid())
            far.close()
            assert identify_peer(near) == IN_DOUBT


def test_half_closed_peer_is_identified(table):
    with connected() as (near, far):
        far.shutdown(socket.SHUT_WR)
        assert identify_peer(near) == Identity(uid=os.getuid())


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Remembering:
    """A socket that was asked for its addresses just before it was reset."""

    family = socket.AF_INET

    def __init__(self, sock: socket.socket, far: tuple[str, int]) -> None:
        self._far, self._near = far, sock.getsockname()
        self.fileno, self.getsockopt = sock.fileno, sock.getsockopt

    def setsockopt(self, *_: object) -> None:
        never()

    def getpeername(self) -> tuple[str, int]:
        return self._far

    def getsockname(self) -> tuple[str, int]:
        near: tuple[str, int] = self._near
        return near


def never(*_: object) -> int:
    raise AssertionError("must not be called")


def test_reset_peer_is_not_identified_as_its_successor(table):
    """One process resets, and the next gets the same two addresses before we look."""
    with socket.create_server((V4, 0)) as server:
        quiet = f"127.77.{os.getpid() % 250}.7"  # an address whose ports no other test uses
        first = socket.create_connection(server.getsockname(), source_address=(quiet, 0))
        place = first.getsockname()
        first.send(b"forged")
        reset(first)
        second = socket.socket()
        second.bind(place)
        second.connect(server.getsockname())
        near, far = server.accept()
        with near, second:
            assert far == place
            assert near.recv(10) == b"forged"
            assert identify_peer(near) == IN_DOUBT
            assert identify_peer(near, far) == IN_DOUBT
            assert identify_peer(Remembering(near, far)) == IN_DOUBT
            (other, _) = server.accept()
            with other:
                assert identify_peer(other) == Identity(uid=os.getuid())


def test_listener_at_the_peer_address_is_not_the_owner(table):
    with socket.create_server((V4, 0)) as listener, connected() as (near, _):
        far = SocketEnd(packed(V4), listener.getsockname()[1])
        assert table.owner(far, SocketEnd(packed(V4), near.getsockname()[1])) is None


def test_remote_peer_is_anonymous(monkeypatch: pytest.MonkeyPatch):
    class Elsewhere:
        family = socket.AF_INET

        def getpeername(self) -> tuple[str, int]:
            return ("192.0.2.1", 5)

        def getsockname(self) -> tuple[str, int]:
            return (V4, 5)

    monkeypatch.setattr(
        peer_identity, "socket_table", lambda: type("T", (), {"owner": staticmethod(never)})
    )
    assert identify_peer(Elsewhere()) == ANONYMOUS  # type: ignore[arg-type]


def test_remote_peer_that_has_reset_is_anonymous():
    with socket.socket() as sock:
        assert identify_peer(sock, ("192.0.2.1", 5)) == ANONYMOUS


def test_unconnected_socket_is_in_doubt():
    with socket.socket() as sock:
        assert identify_peer(sock) == IN_DOUBT
    assert identify_peer(None) == IN_DOUBT


def question(sequence: int, far: SocketEnd, near: SocketEnd) -> bytes:
    """Encode a request by linux/netlink.h and linux/inet_diag.h."""
    ends = struct.pack("!HH16s16s", far.port, near.port, far.ip, near.ip)
    any_state, any_cookie = 0xFFFFFFFF, struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    asked = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, any_state)
    body = asked + ends + any_cookie
    return struct.pack("=IHHII", 16 + len(body), 20, 1, sequence, 0) + body


def test_responses_to_earlier_queries_are_ignored():
    table = NetlinkSocketTable()
    with connected() as (near, far):
        ends = [SocketEnd(packed(V4), one.getsockname()[1]) for one in (far, near)]
        for _ in range(3):  # for no socket, and the response is not read
            table._netlink.send(question(999, SocketEnd(packed(V4), 1), ends[1]))
        assert table.owner(*ends) == os.getuid()
    table.close()


def test_closed_netlink_socket_finds_no_owner():
    table = NetlinkSocketTable()
    table.close()
    assert table.owner(SocketEnd(packed(V4), 1), SocketEnd(packed(V4), 2)) is None


def test_proc_net_is_read_without_netlink(monkeypatch: pytest.MonkeyPatch):
    class Closed:
        def __init__(self) -> None:
            raise PermissionError

    class Ignorant:
        def owner(self, far: SocketEnd, near: SocketEnd) -> None:
            return None

        def close(self) -> None:
            pass

    for broken in (Closed, Ignorant):
        monkeypatch.setattr(peer_identity, "NetlinkSocketTable", broken)
        assert isinstance(socket_table.__wrapped__(), ProcNetSocketTable)


def test_unreadable_socket_table_finds_no_owner(tmp_path: Path):
    ends = SocketEnd(packed(V4), 1), SocketEnd(packed(V4), 2)
    assert ProcNetSocketTable(tmp_path).owner(*ends) is None
    (tmp_path / "tcp").write_text("  sl  local_address\n   0: short\n")
    assert ProcNetSocketTable(tmp_path).owner(*ends) is None


def test_entry_that_a_read_of_the_socket_table_has_skipped_is_found(tmp_path: Path):
    line = b"   0: 0100007F:0001 0100007F:0002 01 0:0 0:0 0 4242 0 5\n"
    os.mkfifo(tmp_path / "tcp")

    def write_tables() -> None:
        for lines in (b"", line):
            (tmp_path / "tcp").write_bytes(b"  sl  local_address\n" + lines)

    writer = threading.Thread(target=write_tables, daemon=True)
    writer.start()
    ends = SocketEnd(packed(V4), 1), SocketEnd(packed(V4), 2)
    assert ProcNetSocketTable(tmp_path).owner(*ends) == 4242
    writer.join()


# --- how far along


def test_unsent_bytes_of_a_unix_socket_are_unread_bytes():
    near, far = socket.socketpair()
    with near, far:
        assert unsent_bytes(near) == 0
        near.send(bytes(1000))
        assert unsent_bytes(near) >= 1000
        far.recv(1000)
        assert unsent_bytes(near) == 0


def test_closed_socket_has_no_unsent_bytes():
    with socket.socket() as sock:
        pass
    assert unsent_bytes(sock) == 0
    assert unsent_bytes(None) == 0


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_every_address_of_this_machine_is_local():
    """A secondary address has the route of the primary one. In a network namespace of its own."""
    script = (
        "from polybus.transports.peer_identity import is_own_address as own\n"
        "from polybus.transports.proc_net_table import packed\n"
        "print([own(packed(ip)) for ip in ('10.9.0.1', '10.9.0.2', '10.8.0.1')])\n"
    )
    setup = "ip link set lo up; ip addr add 10.9.0.1/24 dev lo; ip addr add 10.9.0.2/24 dev lo"
    command = ["unshare", "-rn", "sh", "-c", f'{setup}; exec "$0" -c "$1"', sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[True, True, False]\n", done.stderr
