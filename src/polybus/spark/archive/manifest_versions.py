"""The newest manifest of a topic, and the next: numbered files that are never changed.

The next one is made whole under another name, and gets its number by a link, which fails if
the number is taken: of two that add at once one has to begin again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from polybus.errors import Conflict, Damaged
from polybus.spark.archive.archive_folder import OWN, TOPICS, sync_folder
from polybus.spark.archive.manifest import Manifest

if TYPE_CHECKING:
    from polybus.spark.archive.archive_folder import ArchiveFolder

DIGITS = 20
KEPT = 8  # old ones, for whoever wants to know what was before


def list_topics(folder: ArchiveFolder) -> list[str]:
    """Those that something was archived of."""
    places = (folder.path / OWN / TOPICS).glob("*/")
    return sorted(one.topic for place in places if (one := _newest(place)) is not None)


def read_newest(folder: ArchiveFolder, topic: str) -> Manifest:
    """An empty one if nothing was archived yet."""
    return _newest(folder.manifests(topic)) or Manifest(topic)


def _newest(place: Path) -> Manifest | None:
    while True:
        numbers = _numbers(place)
        if not numbers:
            return None
        path = _path(place, numbers[-1])
        try:
            return Manifest.parse(json.loads(path.read_text()))
        except FileNotFoundError:
            continue  # it was the newest when we looked, and is an old one by now
        except ValueError as error:
            raise Damaged(f"{path} is no manifest: {error}") from None


def commit_manifest(folder: ArchiveFolder, manifest: Manifest) -> None:
    """From now on it is the newest. `Conflict` if another one has its number."""
    place = folder.manifests(manifest.topic)
    place.mkdir(parents=True, exist_ok=True)
    draft = place / f".{os.getpid()}.new"
    try:
        with draft.open("w") as file:
            json.dump(manifest.as_json(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, _path(place, manifest.number))
    except FileExistsError:
        raise Conflict(
            f"somebody else adds to the archive of topic {manifest.topic!r}: end one of the two"
        ) from None
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(place)
    for number in _numbers(place)[:-KEPT]:
        _path(place, number).unlink(missing_ok=True)


def _numbers(place: Path) -> list[int]:
    try:
        names = [one.name for one in place.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(name[:DIGITS]) for name in names if name[:DIGITS].isdigit())


def _path(place: Path, number: int) -> Path:
    return place / f"{number:0{DIGITS}}.json"
