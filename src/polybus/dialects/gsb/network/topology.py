"""The announcements of all nodes, and the shortest paths through them. No I/O.

Every node knows the announcements of all others and computes its own paths (link-state routing).
An edge counts if both of its nodes announce it, so a node that has died is out of all paths as
soon as its neighbours announce the loss of their links. Among paths of the same length the one
over the neighbour with the lowest id is taken.

Announcements are repeated every `REFRESH_S`. One that was not repeated for `EXPIRE_S` is
forgotten, but its node stays known for longer: a call to it fails as unavailable, not as unknown.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import NamedTuple

from polybus.dialects.gsb.gsb_packets import MAX_HOPS
from polybus.dialects.gsb.network.announcement import Announcement

REFRESH_S = 30.0
EXPIRE_S = 100.0
MAX_FORGOTTEN = 4096  # nodes that were known once


class Novelty(Enum):
    """The result of offering an announcement."""

    NEWER = "newer"  # it was kept and must be passed on
    KNOWN = "known"  # the same one is kept
    OLDER = "older"  # a newer one is kept, which the sender should get
    TOO_MANY = "too_many"  # the table of nodes is full
    OWN = "own"  # another process announces this node's id


class Path(NamedTuple):
    """The way to a node: the neighbour to which its packets go, and the number of links."""

    via: str
    hops: int


class Topology:
    def __init__(self, node_id: str, max_nodes: int) -> None:
        self._node_id = node_id
        self._max_nodes = max_nodes
        self._announced: dict[str, Announcement] = {}
        self._heard_s: dict[str, float] = {}
        self._forgotten: dict[str, None] = {}
        self._own: Announcement | None = None
        self._paths: dict[str, Path] | None = None

    def __len__(self) -> int:
        return len(self._announced)

    @property
    def announcements(self) -> list[Announcement]:
        """All announcements, the own one included, for a new neighbour."""
        own = [] if self._own is None else [self._own]
        return [*own, *self._announced.values()]

    def set_own(self, announcement: Announcement) -> None:
        self._own = announcement
        self._paths = None

    def offer(self, announcement: Announcement, now_s: float) -> Novelty:
        """Keep a verified announcement if it is newer than the one of its node that is kept."""
        node = announcement.node_id
        if node == self._node_id:
            return self._offer_own(announcement)
        kept = self._announced.get(node)
        if kept is not None and announcement.sequence <= kept.sequence:
            is_same = announcement.sequence == kept.sequence
            return Novelty.KNOWN if is_same else Novelty.OLDER
        if kept is None and len(self._announced) >= self._max_nodes and not self._make_room(node):
            return Novelty.TOO_MANY
        self._announced[node] = announcement
        self._heard_s[node] = now_s
        self._forgotten.pop(node, None)
        if kept is None or kept.neighbours != announcement.neighbours:
            self._paths = None
        return Novelty.NEWER

    def get(self, node: str) -> Announcement | None:
        """Return the announcement of a node, also of one that cannot be reached."""
        return self._announced.get(node)

    def is_newer(self, node: str, sequence: int) -> bool:
        """Return whether an announcement with this sequence would be kept."""
        kept = self._own if node == self._node_id else self._announced.get(node)
        return kept is None or sequence > kept.sequence

    def path_to(self, node: str) -> Path | None:
        return self.paths().get(node)

    def was_known(self, node: str) -> bool:
        return node in self._announced or node in self._forgotten

    def paths(self) -> dict[str, Path]:
        """Return the paths to all nodes that are at most `MAX_HOPS` links away."""
        if self._paths is None:
            self._paths = self._find_paths()
        return self._paths

    def expire(self, now_s: float) -> list[str]:
        """Forget announcements that were not repeated. Returns their nodes."""
        old = [node for node, heard_s in self._heard_s.items() if now_s - heard_s > EXPIRE_S]
        for node in old:
            del self._announced[node], self._heard_s[node]
            self._forgotten[node] = None
            self._paths = None
        while len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        return old

    def _make_room(self, node: str) -> bool:
        """Forget a node without a path, or any for a neighbour. Returns False if none may go."""
        paths = self.paths()
        is_neighbour = self._own is not None and node in self._own.neighbours
        lost = next((one for one in self._announced if one not in paths), None)
        if lost is None and is_neighbour:
            lost = max(paths, key=lambda one: paths[one].hops)
        if lost is None:
            return False
        del self._announced[lost], self._heard_s[lost]
        self._paths = None
        return True

    def _offer_own(self, announcement: Announcement) -> Novelty:
        """An announcement of this node comes back, from an earlier run or from another process."""
        own = self._own
        if own is None or announcement.sequence > own.sequence:
            return Novelty.OWN
        if announcement.sequence == own.sequence and announcement != own:
            return Novelty.OWN
        return Novelty.KNOWN

    def _find_paths(self) -> dict[str, Path]:
        """Breadth first from this node, over edges that both ends announce."""
        paths: dict[str, Path] = {}
        if self._own is None:
            return paths
        queue: deque[str] = deque()
        for node in self._own.neighbours:
            if self._has_edge(node, self._node_id):
                paths[node] = Path(node, 1)
                queue.append(node)
        while queue:
            node = queue.popleft()
            via, hops = paths[node]
            if hops == MAX_HOPS:
                continue
            for next_node in self._announced[node].neighbours:
                is_new = next_node not in paths and next_node != self._node_id
                if is_new and self._has_edge(next_node, node):
                    paths[next_node] = Path(via, hops + 1)
                    queue.append(next_node)
        return paths

    def _has_edge(self, node: str, neighbour: str) -> bool:
        """Return whether a node announces this neighbour."""
        announced = self._announced.get(node)
        return announced is not None and neighbour in announced.neighbours
