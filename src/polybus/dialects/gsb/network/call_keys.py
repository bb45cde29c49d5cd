"""The keys of calls between this node and others (call_key.pyx), by the runs of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.dialects.gsb.network.call_key import CallKey

if TYPE_CHECKING:
    from polybus.dialects.gsb.network.announcement import Announcement
    from polybus.dialects.gsb.network.node_key import NodeKey

MAX_KEYS = 16_384  # some 1 KiB each; more than the nodes of half an hour, with `max_nodes` 1024
Run = tuple[str, int, bytes]  # a node, its instance and its exchange key


class CallKeys:
    def __init__(self, key: NodeKey, instance: int) -> None:
        self._key = key
        self._own = bytes.fromhex(key.node_id[2:])
        self._instance = instance
        # Of earlier runs, too: a hop may repeat the announcement of a run that others have
        # forgotten, and then its calls. The key that was used least recently comes first.
        self._keys: dict[Run, CallKey] = {}

    def key_for(self, node: Announcement) -> CallKey:
        """Return the key of the calls between this node and the announced run of another.

        Raises ValueError if the other has announced an invalid key.
        """
        run = node.node_id, node.instance, node.exchange
        key = self._keys.pop(run, None)
        if key is None:
            secret = self._key.shared_secret(node.exchange)
            other = bytes.fromhex(node.node_id[2:])
            key = CallKey(secret, self._own, self._instance, other, node.instance)
        self._keys[run] = key
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        return key
