"""A master of Spark that is none, or that nobody answers on, is told before Spark begins."""

from __future__ import annotations

import socket

import pytest

from polybus.errors import ConfigError, NotConnected
from polybus.spark.spark_session import check_master, session


@pytest.fixture
def place():
    """Where something answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nobody():
    """A port that is taken, and not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize(
    "given", ["local", "local[*]", "local[2]", "local[*,4]", "yarn", "k8s://https://host:443"]
)
def test_what_spark_knows_is_let_through(given):
    check_master(given)


@pytest.mark.parametrize("given", ["", "rubbish", "spark:/host:1", "spark://host", "local[a]"])
def test_what_is_no_master_is_named(given):
    with pytest.raises(ConfigError, match="is no master of Spark"):
        session(given)


def test_one_that_answers_is_enough(place, nobody):
    check_master(f"spark://{place}")
    check_master(f"spark://{nobody},{place}")


def test_nobody_answers(nobody):
    with pytest.raises(NotConnected, match=f"no master of Spark answers at spark://{nobody}"):
        session(f"spark://{nobody}")
