"""Names and addresses of the deployed bus as those of this one."""

from __future__ import annotations

import pytest

from polybus.dialects.gsb.ya.ya_address import to_native
from polybus.errors import MalformedRequest

NODE = "0x" + "ab" * 20
PAIRS = {
    "/local/greeter": "greeter",
    "/local/greeter/Hello": "greeter/Hello",
    "/local/sys/ping": "sys/ping",
    "/public/market": "public/market",
    "/public/market/Get": "public/market/Get",
    f"/net/{NODE}/market": f"/net/{NODE}/public/market",
    f"/net/{NODE}/public/market": f"/net/{NODE}/public/public/market",
}


@pytest.mark.parametrize("address", PAIRS)
def test_address_here(address):
    assert to_native(address) == PAIRS[address]


def test_no_two_addresses_mean_the_same():
    assert len(set(PAIRS.values())) == len(PAIRS)


def test_name_without_a_slash_is_a_local_one():
    assert to_native("echo") == "echo"


@pytest.mark.parametrize(
    "address", ["/", "/local", "/public", "/net", "/from/x", "/x", "/local/public/x"]
)
def test_other_forms_are_refused(address):
    with pytest.raises(MalformedRequest):
        to_native(address)


@pytest.mark.parametrize("address", ["/net/", f"/net/{NODE}", f"/net/{NODE}/"])
def test_address_without_a_service_is_left_to_the_bus(address):
    assert to_native(address) == address
