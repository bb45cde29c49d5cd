"""Sabotages of Freud's subscriptions and frames."""

from __future__ import annotations

from tests.rig.patching import Patch

SABOTAGES = [
    # A subscription ends with its connection.
    Patch(
        "detached-dropped",
        "dialects/freud/server/pull_reader.py",
        "                reader.is_owned = False\n                self.renew(reader)\n",
        '                self.end(reader, "abandoned")\n',
    ),
    # Detached subscriptions keep their room.
    Patch(
        "detached-never-evicted",
        "dialects/freud/server/detached_readers.py",
        "        return not reader.is_owned and not reader.waiters\n",
        "        return False\n",
    ),
    # The newest detached subscription goes first.
    Patch(
        "newest-evicted-first",
        "dialects/freud/server/detached_readers.py",
        "        reader = next((reader for reader in own if self.can_evict(reader)), None)\n",
        "        reader = next((reader for reader in reversed(own) if self.can_evict(reader)), None)\n",
    ),
    # A subscriber id works for every user.
    Patch(
        "ids-work-for-all",
        "dialects/freud/server/session.py",
        "self._topics.plain_delivery.find_reader(self.pipe.identity.account, run.subscriber)",
        "self._readers.by_id.get(run.subscriber)",
    ),
    # A new rule does not end detached subscriptions.
    Patch(
        "detached-outlive-rights",
        "dialects/freud/server/pull_reader.py",
        "            if not policy.allows(reader.identity,",
        "            if reader.is_owned and not policy.allows(reader.identity,",
    ),
    # Get Message delivers a body that looks like a notice as it is.
    Patch(
        "bodies-unescaped",
        "dialects/freud/codec.py",
        "    return BODY_PREFIX + body\n",
        "    return body\n",
    ),
    # A frame that stays unfinished is not reported.
    Patch(
        "unfinished-unreported",
        "transports/unfinished_frames.py",
        "            if unfinished is not None:\n",
        "            if False:\n",
    ),
    # Every listener speaks the first framing.
    Patch(
        "one-framing",
        "bus/framing_listeners.py",
        "        value = dict(address.options).get(self._option, usual)\n",
        "        value = usual\n",
    ),
]
