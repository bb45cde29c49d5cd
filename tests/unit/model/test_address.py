"""Addresses: parsing, printing, and error messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.errors import AddressError
from polybus.model.address import HOST_SCHEMES, MAX_UNIX_PATH_BYTES, PATH_SCHEMES, Address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:6567", Address("tcp", "127.0.0.1", 6567)),
        ("tcp://localhost:0", Address("tcp", "localhost", 0)),
        ("tls://bus.example:1", Address("tls", "bus.example", 1)),
        ("tls+tcp://[::1]:6569", Address("tls+tcp", "::1", 6569)),
        ("grpc+tls://10.0.0.1:65535", Address("grpc+tls", "10.0.0.1", 65535)),
        ("https://[fe80::1%eth0]:1", Address("https", "fe80::1%eth0", 1)),
        ("unix:/run/polybus/admin.sock", Address("unix", path="/run/polybus/admin.sock")),
        ("unix:bus.sock", Address("unix", path="bus.sock")),
        ("ipc:///run/gsb.sock", Address("ipc", path="/run/gsb.sock")),
    ],
)
def test_parse_and_back(text, address):
    assert Address.parse(text) == address
    assert str(address) == text


def test_other_spellings_are_taken():
    assert str(Address.parse("unix:///run/a.sock")) == "unix:/run/a.sock"
    assert str(Address.parse("ipc:/run/a.sock")) == "ipc:///run/a.sock"
    assert str(Address.parse("http://127.0.0.1:80/")) == "http://127.0.0.1:80"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no scheme"),
        ("127.0.0.1", "no scheme: write for example tcp://127.0.0.1"),
        ("/run/bus.sock", "no scheme: write for example unix:/run/bus.sock"),
        ("127.0.0.1:6567", "unknown scheme '127.0.0.1'"),
        ("ftp://x:1", "unknown scheme 'ftp'"),
        ("TCP://x:1", "unknown scheme 'TCP'"),
        ("tcp:127.0.0.1:1", "lacks '//'"),
        ("tcp://127.0.0.1", "no port"),
        ("tcp://127.0.0.1:", "no port"),
        ("tcp://:1", "no host"),
        ("tcp://*:1", "0.0.0.0"),
        ("tcp://::1:6567", "brackets"),
        ("tcp://[::1:6567", "unfinished"),
        ("tcp://[::1]6567", "unfinished"),
        ("tcp://[127.0.0.1]:1", "not an IPv6 address"),
        ("tcp://[nope]:1", "not an IPv6 address"),
        ("tcp://a b:1", "impossible host"),
        ("tcp://user@host:1", "impossible host"),
        ("tcp://-x:1", "impossible host"),
        ("tcp://x:65536", "from 0 to 65535"),
        ("tcp://x:-1", "from 0 to 65535"),
        ("tcp://x:+1", "from 0 to 65535"),
        ("tcp://x:１", "from 0 to 65535"),
        ("tcp://x:99999999999999999999", "from 0 to 65535"),
        ("tcp://x:1/path", "no path"),
        ("unix:", "no path"),
        ("unix://", "no path"),
        ("unix:@abstract", "abstract"),
        ("unix:a\0b", "abstract"),
        ("unix:/" + "a" * MAX_UNIX_PATH_BYTES, "at most 107 bytes, this one 108"),
        ("unix:/" + "é" * 60, "at most 107 bytes, this one 121"),
    ],
)
def test_invalid_address_is_refused_with_its_reason(text, says):
    with pytest.raises(AddressError) as caught:
        Address.parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_longest_path_fits():
    path = "/" + "a" * (MAX_UNIX_PATH_BYTES - 1)
    assert Address.parse(f"unix:{path}").path == path


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.8.8:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://[::ffff:127.0.0.1]:1", True),
        ("tcp://localhost:1", True),
        ("unix:/x", True),
        ("ipc:///x", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://[::ffff:10.0.0.1]:1", False),
        ("tcp://localhost.example:1", False),
        ("tcp://127.1:1", False),  # maybe it is, but the text does not say so for sure
    ],
)
def test_only_unambiguous_addresses_are_loopback(text, loopback):
    assert Address.parse(text).is_loopback is loopback


def test_encrypted():
    encrypted = {scheme for scheme in HOST_SCHEMES if Address(scheme, "x", 1).is_encrypted}
    assert encrypted == {"tls", "tls+tcp", "grpc+tls", "https"}
    assert not Address("unix", path="/x").is_encrypted


def test_with_port():
    assert str(Address.parse("tcp://[::1]:0").with_port(77)) == "tcp://[::1]:77"


HOSTS = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?\Z").filter(lambda host: ":" not in host),
)
PATHS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20
).map("/{}".format)


@given(st.sampled_from(sorted(HOST_SCHEMES)), HOSTS, st.integers(0, 65535))
def test_every_host_address_round_trips(scheme, host, port):
    address = Address(scheme, host, port)
    assert Address.parse(str(address)) == address


@given(st.sampled_from(PATH_SCHEMES), PATHS)
def test_every_path_round_trips(scheme, path):
    if path.startswith("//") and scheme == "unix":
        path = "/" + path.lstrip("/") if path.lstrip("/") else "/x"
    address = Address(scheme, path=path)
    assert Address.parse(str(address)) == address


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_clear_error(text):
    try:
        address = Address.parse(text)
    except AddressError:
        return
    assert Address.parse(str(address)) == address
