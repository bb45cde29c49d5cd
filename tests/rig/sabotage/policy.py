"""Sabotages of access rules."""

from __future__ import annotations

from tests.rig.patching import Patch

SABOTAGES = [
    # Rules are listed, and have no effect.
    Patch(
        "no-rules",
        "bus/policy.py",
        "                self._tables.setdefault(verb, VerbTable()).add(one, bit)\n",
        "                pass\n",
    ),
    # Dead letters have only the rules that cover their own name.
    Patch(
        "inheritance-off",
        "bus/policy.py",
        "        source = None if verb == CALL else topic_name.dead_letter_source(topic)\n",
        "        source = None\n",
    ),
    # No topic is reserved for the bus.
    Patch(
        "reserved-off",
        "bus/policy.py",
        "        self._reserved = {name.encode(): purpose for name, purpose in (reserved or {}).items()}\n",
        "        self._reserved = {}\n",
    ),
    # Dead letters go to any topic of the right name.
    Patch(
        "squatted-letters-filled",
        "durable/topic_names.py",
        "        if owner.account != creator.account and not self._policy.is_born_admin(owner):\n",
        "        if False:\n",
    ),
]
