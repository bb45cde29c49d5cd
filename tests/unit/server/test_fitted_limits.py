"""Limits of connections that follow the limit of descriptors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polybus.model.address import Address
from polybus.server.listener_plan import ListenerSpec
from polybus.server.process_tuning import (
    MAX_STREAM_RESERVE,
    OWN_DESCRIPTORS,
    SURPLUS_DESCRIPTORS,
    DescriptorLimit,
    DescriptorUse,
    fit_limits,
)
from polybus.server.settings import Settings

EACH_NATIVE = 3
PLAIN_NATIVE = DescriptorUse({"native": EACH_NATIVE}, needs_reserve=False)
NATIVE_AND_PIRATE = DescriptorUse({"native": EACH_NATIVE}, needs_reserve=True)
PIRATE = DescriptorUse({}, needs_reserve=True)


def listener(dialect: str, address: str) -> ListenerSpec:
    return ListenerSpec(dialect, Address.parse(address), listed=True)


def fitted(descriptors: int, streams: int = 10_000, native: int = 4096) -> tuple[int, int]:
    settings = Settings()
    limits = replace(settings.limits, max_connections=streams)
    own = replace(settings.section("native"), max_connections=native)
    settings = replace(settings, limits=limits, dialects={**settings.dialects, "native": own})
    found = fit_limits(settings, DescriptorLimit(descriptors, descriptors), NATIVE_AND_PIRATE)
    return found.limits.max_connections, found.section("native").max_connections


ADMIN = Settings().server.max_admin_connections
KEPT = OWN_DESCRIPTORS + ADMIN + SURPLUS_DESCRIPTORS


def with_reserve(streams: int) -> int:
    """Twice, up to a bound: a stream connection may need a descriptor of the reserve."""
    return streams + min(streams, MAX_STREAM_RESERVE)


def test_enough_descriptors_change_nothing():
    settings = Settings()
    assert fit_limits(settings, DescriptorLimit(1024, 18_000), PLAIN_NATIVE) is settings


@pytest.mark.parametrize("descriptors", [1, 64, 163, 164, 256, 1024, 4096, 14_000])
@pytest.mark.parametrize(("streams", "native"), [(10_000, 4096), (1, 4096), (10_000, 1), (50, 50)])
def test_all_connections_fit_and_no_listener_is_shut_out(descriptors, streams, native):
    found = fitted(descriptors, streams, native)
    assert with_reserve(found[0]) + EACH_NATIVE * found[1] <= max(5, descriptors - KEPT)
    assert 1 <= found[0] <= streams
    assert 1 <= found[1] <= native


def test_both_are_lowered_in_proportion():
    assert fitted(256) == (23, 16)


def test_native_port_that_does_not_listen_takes_no_descriptors():
    found = fit_limits(Settings(), DescriptorLimit(2000, 2000), DescriptorUse({}, False))
    assert found.limits.max_connections == 2000 - OWN_DESCRIPTORS - ADMIN


def test_beside_pirate_there_is_a_reserve():
    found = fit_limits(Settings(), DescriptorLimit(2000, 2000), PIRATE)
    assert found.limits.max_connections == (2000 - KEPT) // 2
    found = fit_limits(Settings(), DescriptorLimit(8000, 8000), PIRATE)
    assert found.limits.max_connections == 8000 - KEPT - MAX_STREAM_RESERVE


@pytest.mark.needs("pirate")
@pytest.mark.needs("rqueue")
def test_dialects_declare_the_descriptors_that_they_take():
    plain, encrypted = "grpc://127.0.0.1:0", "grpc+tls://127.0.0.1:0"
    rqueue = listener("rqueue", "tcp://127.0.0.1:0")
    admin = listener("admin", "unix:/run/admin.sock")
    assert DescriptorUse.of([admin, rqueue]) == DescriptorUse({}, needs_reserve=False)
    assert DescriptorUse.of([rqueue, listener("native", plain)]) == PLAIN_NATIVE
    native = [listener("native", plain), listener("native", encrypted), listener("native", plain)]
    assert DescriptorUse.of(native) == DescriptorUse({"native": 5}, needs_reserve=False)
    pirate = listener("pirate", "tcp://127.0.0.1:0")
    assert DescriptorUse.of([pirate, listener("native", plain)]) == NATIVE_AND_PIRATE


def test_dialects_that_count_apart_share_in_proportion():
    settings = Settings()
    sections = {**settings.dialects, "other": settings.section("native")}
    settings = replace(settings, dialects=sections)
    use = DescriptorUse({"native": 3, "other": 1}, needs_reserve=False)
    found = fit_limits(settings, DescriptorLimit(2000, 2000), use)
    native, other = (found.section(name).max_connections for name in ("native", "other"))
    assert native == other
    total = found.limits.max_connections + 3 * native + other
    assert 2000 - OWN_DESCRIPTORS - ADMIN - 4 <= total <= 2000 - OWN_DESCRIPTORS - ADMIN
