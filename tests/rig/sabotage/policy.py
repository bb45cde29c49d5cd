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
    # A local peer whose user is not known escapes the rules that name users.
    Patch(
        "in-doubt-is-anonymous",
        "bus/policy.py",
        "is_user = identity.is_in_doubt and _may_name_local(who, number)\n",
        "is_user = identity.is_in_doubt and who.kind == rules.ANONYMOUS\n",
    ),
]
