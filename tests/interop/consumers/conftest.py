"""Buses for the tests of FDQ consumers: in-process, and behind the native port."""

import pytest

from polybus import fdq
from tests.interop.consumers.consumer_fixture import unhurried
from tests.rig.native_bus import NativeBus


@pytest.fixture(scope="session")
def native_url():
    with NativeBus() as bus:
        yield bus.url


@pytest.fixture(params=["memory", "native"])
def url(request):
    if request.param == "memory":
        # One client stays open during the test, so that others may be opened and closed.
        with fdq.Producer("memory:consumers"):
            yield "memory:consumers"
    else:
        yield request.getfixturevalue("native_url")


@pytest.fixture
def topic(request):
    return f"{request.node.name}".replace("[", "-").replace("]", "").replace("_", "-")


@pytest.fixture
def consumer(url):
    with unhurried(url) as one:
        yield one
