"""Checks before Spark starts: the bus answers, topics exist, folders are writable.

Each failure is a polybus error of one line. Spark would report it later and in many lines.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from polybus.errors import DoesNotExist, UsageError
from polybus.native import Client, ClientOptions
from polybus.spark.source.log_access import open_log_access
from polybus.spark.source.read_bounds import TopicSelection
from polybus.spark.spark_options import SOURCE_OPTIONS, SparkOptions
from polybus.store.engine_registry import is_store_url


def check_bus(given: str | None) -> str:
    """Return the URL of a bus that answers now, or of the files of a store."""
    url = SparkOptions({"bus": given} if given else {}, SOURCE_OPTIONS).bus
    if not is_store_url(url):
        with Client(url, ClientOptions(connect_timeout_s=0.0)) as client:
            client.topics("")
    return url


def check_target_bus(given: str | None, source: str) -> str:
    """Return the URL of the bus to write to: `given`, or else the source."""
    url = check_bus(given) if given else source
    if is_store_url(url):
        raise UsageError(
            f"cannot write to {url}: its bus is the only writer; give --into-bus polybus://…"
        )
    return url


def find_topics(bus: str, text: str) -> list[str]:
    """Return the selected topics; raises `DoesNotExist` if a named one is missing or none match."""
    wanted = TopicSelection(text)
    topics = wanted.find_topics(open_log_access(bus))
    if not topics:
        raise DoesNotExist(
            f"no durable topic matches {wanted.text!r}; polybus topic ls lists the topics"
        )
    for name in wanted.names:
        check_topic(bus, name)
    return topics


def check_topic(bus: str, topic: str) -> None:
    """Raise `DoesNotExist` if there is no such durable topic."""
    try:
        open_log_access(bus).shards(topic)
    except DoesNotExist:
        raise DoesNotExist(
            f"there is no durable topic {topic!r}; polybus topic ls lists the topics"
        ) from None


def check_checkpoint(given: str | None, purpose: str = "") -> str:
    """Return the checkpoint as Spark takes it: a writable folder, or a URL, which Spark checks."""
    if given is not None and "://" in given:
        return given
    return str(check_folder(given, "--checkpoint", purpose))


def check_folder(given: str | os.PathLike[str] | None, option: str, purpose: str) -> Path:
    """Return a writable folder. Creates it if it is missing."""
    if given is None or not str(given).strip():
        raise UsageError(f"{option} FOLDER is missing: {purpose}")
    path = Path(given).expanduser().absolute()
    probe = path / f".polybus-{uuid.uuid4().hex}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"{option} {path} is not writable ({error.strerror}): give another folder, or "
            "change its permissions"
        ) from None
    return path
