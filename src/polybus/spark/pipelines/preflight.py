"""What can be told before Spark begins: no bus, no such topic, a folder that cannot be written.

Each is an error of ours, in one line: what Spark makes of the same comes later, and in many.
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
    """The URL of a bus that answers now, or of the files of one."""
    url = SparkOptions({"bus": given} if given else {}, SOURCE_OPTIONS).bus
    if not is_store_url(url):
        with Client(url, ClientOptions(connect_timeout_s=0.0)) as client:
            client.topics("")
    return url


def check_target_bus(given: str | None, source: str) -> str:
    """Where to write: another bus, if one is named, else the one that is read."""
    url = check_bus(given) if given else source
    if is_store_url(url):
        raise UsageError(
            f"write through the running bus: {url} can only be read (--into-bus polybus://…)"
        )
    return url


def find_topics(bus: str, text: str) -> list[str]:
    """Those that are there now; each that is named must be."""
    wanted = TopicSelection(text)
    found = wanted.find_topics(open_log_access(bus))
    if not found:
        raise DoesNotExist(f"no durable topic matches {wanted.text!r}: polybus topic ls lists them")
    for name in wanted.names:
        check_topic(bus, name)
    return found


def check_topic(bus: str, topic: str) -> None:
    try:
        open_log_access(bus).shards(topic)
    except DoesNotExist:
        raise DoesNotExist(
            f"there is no durable topic {topic!r}: polybus topic ls lists those that are there"
        ) from None


def check_checkpoint(given: str | None, what_for: str = "") -> str:
    """As Spark takes it: a folder that can be written, or a URL, which is Spark's to look at."""
    if given is not None and "://" in given:
        return given
    return str(check_folder(given, "--checkpoint", what_for))


def check_folder(given: str | os.PathLike[str] | None, option: str, what_for: str) -> Path:
    """A folder that can be written, made if it is not there."""
    if given is None or not str(given).strip():
        raise UsageError(f"{option} FOLDER is missing: {what_for}")
    path = Path(given).expanduser().absolute()
    probe = path / f".polybus-{uuid.uuid4().hex}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be written ({error.strerror}): name another folder, or "
            "correct its rights"
        ) from None
    return path
