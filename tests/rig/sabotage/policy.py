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
    # A local peer whose user is not known escapes the rules that name users.
    Patch(
        "in-doubt-is-anonymous",
        "bus/policy.py",
        "is_user = identity.is_in_doubt and _may_name_local(who, number)\n",
        "is_user = identity.is_in_doubt and who.kind == rules.ANONYMOUS\n",
    ),
    # A change of the rules wakes no wait, which then goes on until its timeout.
    Patch(
        "waits-outlive-rights",
        "native/port/native_port.py",
        "        access.on_rules_changed.append(self.waits.wake_all)\n",
        "",
    ),
    # The right to produce is checked when a batch is staged, and not when it is published.
    Patch(
        "stages-unchecked",
        "native/port/topic_access.py",
        "        numbers = self.durable.store.staged_topics(stages)\n",
        "        numbers = frozenset[int]()\n",
    ),
    # Connections stay open when the authority of their certificates is removed.
    Patch(
        "certificates-outlive-authorities",
        "transports/flight/flight_listener.py",
        "        if tls.authorities != before.authorities:",
        "        if False:",
    ),
]
