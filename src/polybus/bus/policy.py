"""Who may do what. For now everybody who reaches a listener may do everything.

The seams are the final ones: an identity belongs to a *class* of callers that
all rules treat alike, and the fan-out remembers one verdict per class and
topic, so a rule table of any size costs the hot path one array access.
"""

from __future__ import annotations

from polybus.model import names
from polybus.model.identity import Identity

MAX_CLASSES = 65_536  # the fan-out keeps one byte per class and topic


class Policy:
    def __init__(self) -> None:
        self._classes: dict[tuple[int | None, int | None], int] = {}

    def classify(self, identity: Identity) -> int:
        """The number of the class of callers that this one belongs to."""
        key = (identity.uid, identity.gid)
        if len(self._classes) >= MAX_CLASSES:
            self._classes.clear()
        return self._classes.setdefault(key, len(self._classes))

    def may_produce(self, identity_class: int, topic: bytes) -> bool:
        return names.is_probe(topic) or self._allows(identity_class, "produce", topic)

    def may_subscribe(self, identity_class: int, topic: bytes) -> bool:
        return names.is_probe(topic) or self._allows(identity_class, "subscribe", topic)

    def _allows(self, identity_class: int, verb: str, topic: bytes) -> bool:
        return True
