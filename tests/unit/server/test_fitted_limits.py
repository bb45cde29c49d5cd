"""Limits of connections that follow the limit of descriptors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polybus.server.process_tuning import (
    MAX_STREAM_RESERVE,
    NATIVE_DESCRIPTORS,
    OWN_DESCRIPTORS,
    SURPLUS_DESCRIPTORS,
    DescriptorLimit,
    fit_limits,
)
from polybus.server.settings import Settings


def fitted(descriptors: int, streams: int = 10_000, native: int = 4096) -> tuple[int, int]:
    settings = Settings()
    limits = replace(settings.limits, max_connections=streams)
    own = replace(settings.section("native"), max_connections=native)
    settings = replace(settings, limits=limits, dialects={**settings.dialects, "native": own})
    listening = ["native", "native", "pirate"]
    found = fit_limits(settings, DescriptorLimit(descriptors, descriptors), listening)
    return found.limits.max_connections, found.section("native").max_connections


ADMIN = Settings().server.max_admin_connections
KEPT = OWN_DESCRIPTORS + ADMIN + SURPLUS_DESCRIPTORS


def with_reserve(streams: int) -> int:
    """Twice, up to a bound: a stream connection may need a descriptor of the reserve."""
    return streams + min(streams, MAX_STREAM_RESERVE)


def test_enough_descriptors_change_nothing():
    settings = Settings()
    assert fit_limits(settings, DescriptorLimit(1024, 18_000), ["native"]) is settings


@pytest.mark.parametrize("descriptors", [1, 64, 163, 164, 256, 1024, 4096, 14_000])
@pytest.mark.parametrize(("streams", "native"), [(10_000, 4096), (1, 4096), (10_000, 1), (50, 50)])
def test_all_connections_fit_and_no_listener_is_shut_out(descriptors, streams, native):
    found = fitted(descriptors, streams, native)
    assert with_reserve(found[0]) + NATIVE_DESCRIPTORS * found[1] <= max(5, descriptors - KEPT)
    assert 1 <= found[0] <= streams
    assert 1 <= found[1] <= native


def test_both_are_lowered_in_proportion():
    assert fitted(256) == (23, 16)


def test_native_port_that_does_not_listen_takes_no_descriptors():
    found = fit_limits(Settings(), DescriptorLimit(2000, 2000), ["rqueue"])
    assert found.limits.max_connections == 2000 - OWN_DESCRIPTORS - ADMIN


def test_beside_pirate_there_is_a_reserve():
    found = fit_limits(Settings(), DescriptorLimit(2000, 2000), ["pirate"])
    assert found.limits.max_connections == (2000 - KEPT) // 2
    found = fit_limits(Settings(), DescriptorLimit(8000, 8000), ["pirate"])
    assert found.limits.max_connections == 8000 - KEPT - MAX_STREAM_RESERVE
