"""An invalid or unreachable Spark master is reported before Spark starts."""

from __future__ import annotations

import socket

import pytest

from polybus.errors import ConfigError, NotConnected
from polybus.spark.spark_session import check_master, session


@pytest.fixture
def open_port():
    """The address of a listening socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed_port():
    """The address of a port that is bound and does not listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize(
    "given", ["local", "local[*]", "local[2]", "local[*,4]", "yarn", "k8s://https://host:443"]
)
def test_valid_masters_are_accepted(given):
    check_master(given)


@pytest.mark.parametrize("given", ["", "rubbish", "spark:/host:1", "spark://host", "local[a]"])
def test_invalid_master_raises_config_error(given):
    with pytest.raises(ConfigError, match="invalid Spark master"):
        session(given)


def test_one_of_several_masters_must_answer(open_port, closed_port):
    check_master(f"spark://{open_port}")
    check_master(f"spark://{closed_port},{open_port}")


def test_no_master_answers(closed_port):
    with pytest.raises(NotConnected, match=f"no Spark master answers at spark://{closed_port}"):
        session(f"spark://{closed_port}")
