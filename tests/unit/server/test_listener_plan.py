"""Which listeners a bus opens, and which it refuses to."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from polybus.errors import UsageError
from polybus.server import listener_plan
from polybus.server.config import Flag, LoadedSettings, load
from polybus.server.listener_plan import plan_listeners
from polybus.server.program import plan_serve, plan_without_store

RUNTIME = Path("/run/polybus")


def loaded(*listen: str, **flags: object) -> LoadedSettings:
    given = {name: Flag(f"--{name}", value) for name, value in flags.items()}
    return load(None, {}, {"listen": Flag("--listen", listen or None), **given})


def planned(*listen: str, admin: bool = True, **flags: object) -> list[str]:
    wanted = plan_listeners(loaded(*listen, **flags), RUNTIME, admin)
    return [f"{one.dialect} {one.address}" for one in wanted]


def refusal(*listen: str) -> str:
    with pytest.raises(UsageError) as caught:
        planned(*listen)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_default_listeners_without_listen():
    assert planned() == [
        "freud unix:/run/polybus/freud.sock",
        "gsb tcp://127.0.0.1:6569",
        "gsb ipc:///run/polybus/gsb.sock",
        "native grpc://127.0.0.1:6570",
        "pirate tcp://127.0.0.1:6568",
        "rqueue tcp://127.0.0.1:6567",
        "admin unix:/run/polybus/admin.sock",
    ]


def test_listed_addresses_and_the_admin_socket_only():
    assert planned("rqueue=tcp://127.0.0.1:1", "rqueue=unix:/x/r.sock") == [
        "rqueue tcp://127.0.0.1:1",
        "rqueue unix:/x/r.sock",
        "admin unix:/run/polybus/admin.sock",
    ]


def test_admin_socket_can_be_moved_or_left_out():
    assert planned("admin=unix:/x/a.sock") == ["admin unix:/x/a.sock"]
    assert planned("rqueue=tcp://127.0.0.1:1", admin=False) == ["rqueue tcp://127.0.0.1:1"]


def test_localhost_expands_to_all_loopback_addresses(monkeypatch):
    monkeypatch.setattr(listener_plan, "_is_here", lambda host, family: True)
    both = ["rqueue tcp://127.0.0.1:1", "rqueue tcp://[::1]:1"]
    assert planned("rqueue=tcp://localhost:1", admin=False) == both
    monkeypatch.setattr(listener_plan, "_is_here", lambda host, family: host != "::1")
    assert planned("rqueue=tcp://localhost:1", admin=False) == both[:1]
    said = refusal("rqueue=tcp://localhost:1", "rqueue=tcp://127.0.0.1:1")
    assert "asked for twice" in said


def test_loopback_exists_if_it_can_be_bound():
    assert listener_plan._is_here("127.0.0.1", socket.AF_INET)
    assert not listener_plan._is_here(
        "192.0.2.1", socket.AF_INET
    )  # assigned to no host by RFC 5737


def test_relative_socket_path_becomes_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert planned("rqueue=unix:r.sock", admin=False) == [f"rqueue unix:{tmp_path}/r.sock"]


@pytest.mark.parametrize("name", ["console", "RQUEUE", "", "x", "gsb+", "gsb+x", "rqueue+ya"])
def test_unknown_dialect_is_refused(name):
    said = refusal(f"{name}=tcp://127.0.0.1:1")
    known = "freud, gsb, gsb+ya, native, pirate, rqueue, admin"
    assert said == f"--listen: unknown dialect {name!r}: this bus has {known}"


@pytest.mark.parametrize(
    ("listen", "says"),
    [
        ("rqueue", "'rqueue' is not DIALECT=ADDRESS"),
        ("tcp://127.0.0.1:1", "is not DIALECT=ADDRESS"),
        ("rqueue=", "no scheme"),
        ("rqueue=tcp://127.0.0.1", "no port"),
        ("rqueue=http://127.0.0.1:1", "its schemes are tcp, tls, unix"),
        ("admin=tcp://127.0.0.1:1", "its schemes are unix"),
        ("rqueue=tls://127.0.0.1:1", "needs a certificate"),
        ("rqueue=tcp://0.0.0.0:1", "could be reached by other machines"),
        ("rqueue=tcp://[::]:1", "insecure = true"),
        ("rqueue=tcp://bus.example:1", "could be reached by other machines"),
        ("rqueue=unix:/" + "a" * 200, "at most 107 bytes"),
        ("gsb+ya=ipc:///x/ya.sock", "gsb+ya cannot listen on ipc:///x/ya.sock"),
        ("gsb+ya=tcp://0.0.0.0:1", "gsb+ya on tcp://0.0.0.0:1 could be reached"),
        ("gsb+ya=tcp://127.0.0.1:1?framing=sp", "option must be one of: none"),
    ],
)
def test_invalid_listener_is_refused_with_the_reason(listen, says):
    assert says in refusal(listen)


def test_another_framing_is_a_listener_of_its_dialect():
    (one,) = plan_listeners(loaded("gsb+ya=tcp://127.0.0.1:7464"), RUNTIME, admin=False)
    assert (one.dialect, one.framing, one.name) == ("gsb", "ya", "gsb+ya")
    assert dict(one.address.options) == {"framing": "ya"}
    both = "gsb=tcp://127.0.0.1:1", "gsb+ya=tcp://127.0.0.1:1"
    assert "asked for twice, by gsb and gsb+ya" in refusal(*both)


def test_insecure_must_be_set_explicitly():
    assert planned("rqueue=tcp://0.0.0.0:1", admin=False, insecure=True) == [
        "rqueue tcp://0.0.0.0:1"
    ]


def test_tls_beyond_loopback_is_accepted():
    environ = {"POLYBUS_TLS_CERTIFICATE": "/c.pem", "POLYBUS_TLS_KEY": "/k.pem"}
    settings = load(None, environ, {"listen": Flag("--listen", ("rqueue=tls://0.0.0.0:1",))})
    assert str(plan_listeners(settings, RUNTIME)[0].address) == "tls://0.0.0.0:1"


@pytest.mark.needs(dialect="freud")
def test_listener_options_are_those_that_the_dialect_declares():
    plain, other = plan_listeners(
        loaded("freud=unix:/x/a", "freud=unix:/x/b?length=with-header"), RUNTIME, False
    )
    assert (plain.address.options, plain.address.path) == ((), "/x/a")
    assert other.address.options == (("length", "with-header"),)
    assert str(other.address) == "unix:/x/b"
    assert "one of: length; got 'size'" in refusal("freud=unix:/x/a?size=1")
    assert "one of: payload, with-header; got ''" in refusal("freud=unix:/x/a?length")
    assert "given once" in refusal("freud=unix:/x/a?length=payload&length=payload")
    assert "one of: none; got 'length'" in refusal("rqueue=tcp://127.0.0.1:1?length=payload")
    assert "one of: none; got 'length'" in refusal("admin=unix:/x/a?length=payload")
    assert "asked for twice" in refusal("freud=unix:/x/a", "freud=unix:/x/a?length=with-header")


def test_duplicate_address_is_refused_except_port_0():
    assert "asked for twice" in refusal("rqueue=tcp://127.0.0.1:1", "rqueue=tcp://127.0.0.1:1")
    assert "asked for twice" in refusal("rqueue=unix:/x", "admin=unix:/x")
    assert len(planned("rqueue=tcp://127.0.0.1:0", "rqueue=tcp://127.0.0.1:0", admin=False)) == 2


def test_too_long_runtime_path_is_an_error():
    with pytest.raises(UsageError, match="at most 107 bytes"):
        plan_listeners(loaded(), Path("/" + "d" * 100))


@pytest.mark.parametrize("url", ["memory:", "lmdb:/x"])
def test_engine_url_is_used_unchanged(url):
    assert plan_serve(loaded(engine=url), {"XDG_RUNTIME_DIR": "/run"}).engine == url


def test_default_store_is_in_the_data_folder():
    program = plan_serve(loaded(data=Path("/srv/bus")), {"XDG_RUNTIME_DIR": "/run"})
    assert (program.data, program.engine) == (Path("/srv/bus"), "lmdb:/srv/bus/store")


def test_planned_engine_is_refused():
    with pytest.raises(UsageError, match="--engine: engine 'nats://a,b' is still to come"):
        plan_serve(loaded(engine="nats://a,b"), {"XDG_RUNTIME_DIR": "/run"})


def test_unknown_engine_is_refused():
    with pytest.raises(UsageError, match="unknown engine 'redis:'"):
        plan_serve(loaded(engine="redis:"), {"XDG_RUNTIME_DIR": "/run"})


def test_rqueue_alone_has_no_data_folder():
    environ = {"XDG_RUNTIME_DIR": "/run"}
    assert plan_without_store(loaded(), environ, admin=False).data is None
    assert plan_serve(loaded(data="/d"), environ).data == Path("/d")


def test_pirate_beyond_loopback_needs_keys():
    said = refusal("pirate=tcp://0.0.0.0:1")
    assert "set curve = true in [pirate], or say insecure = true" in said
    with_keys = load(
        None, {"POLYBUS_PIRATE_CURVE": "true", "POLYBUS_LISTEN": "pirate=tcp://0.0.0.0:1"}
    )
    assert [str(one.address) for one in plan_listeners(with_keys, RUNTIME, admin=False)] == [
        "tcp://0.0.0.0:1"
    ]
