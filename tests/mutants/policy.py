"""Breaks identity, policy and quotas on purpose, and demands that their tests notice.

    python tests/mutants/policy.py [part of a mutant's name ...]

The same procedure as in bus.py, with unit tests alone. Each mutant would let a peer do
something that a rule forbids, or refuse something that the rules allow.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants import bus  # noqa: E402
from tests.mutants.bus import mutants  # noqa: E402

SUITES: dict[str, tuple[str, ...]] = {
    "unit": (
        "tests/unit/model/test_access_rule.py",
        "tests/unit/bus/test_policy.py",
        "tests/unit/bus/test_quotas.py",
        "tests/unit/server/test_acl_file.py",
        "tests/unit/server/test_acl.py",
        "tests/unit/server/test_admin.py",
        "tests/unit/server/test_user_directory.py",
        "tests/unit/transports/test_peer.py",
    ),
}

POLICY = mutants(
    "bus/policy.py",
    ("probes are judged", "if topic_name.is_probe(topic):\n            return _PROBE", "pass"),
    (
        "classes judge probes",
        "        if topic_name.is_probe(topic):\n            return _PROBE\n        restriction",
        "        restriction",
    ),
    ("root can be locked out", "identity.uid in self._admins", "False"),
    ("a key of root's is root", "return not identity.key and identity.uid", "return identity.uid"),
    ("creators win over deny", "if by_rule and by_rule.is_deny_rule:", "if False:"),
    ("creators have no rights", "if verb == DELETE and is_creator:", "if False:"),
    ("creators have all rights", "if verb == DELETE and is_creator:", "if is_creator:"),
    ("admins delete anywhere", "if verb == DELETE and as_admin and", "if verb == DELETE and"),
    (
        "overflow is allowed",
        "[RuleMatch(0, (1 << len(bits)) - 1)]",
        "[RuleMatch((1 << len(bits)) - 1, 0)]",
    ),
    ("classes without end", "if len(self._classes) >= MAX_CLASSES:", "if False:"),
    ("doubt does not deny", "speaking.bit & named.possibly", "speaking.bit & named.surely"),
    ("doubt allows", "speaking.bit & named.surely", "speaking.bit & named.possibly"),
    (
        "doubt is remembered",
        "if found.surely == found.possibly or one.is_in_doubt or one.node:",
        "if True:",
    ),
    (
        "in doubt is anonymous",
        "is_user = identity.is_in_doubt and _may_name_local(who, number)",
        "is_user = identity.is_in_doubt and who.kind == rules.ANONYMOUS",
    ),
    (
        "in doubt is every key",
        "return who.kind not in (rules.KEY, rules.NODE) and not",
        "return not",
    ),
    (
        "in doubt is a ghost",
        "who.kind not in (rules.KEY, rules.NODE) and not is_unknown_here",
        "True",
    ),
    ("the main group does not count", "identity.groups | {identity.gid}", "identity.groups"),
    ("a key keeps its user's rules", "if who.kind == rules.KEY or identity.key:", "if False:"),
    ("unknown names name all", "if number is None or identity.uid is None:", "if False:"),
    ("an allow rule closes nothing", "return Decision(False, _CLOSED, closing)", "return None"),
    ("change is not reported", "            changed()", "            pass"),
)

RULETABLE = mutants(
    "bus/rule_table.py",
    ("patterns are not looked at", "if speaking.pattern.matches(topic):", "if True:"),
    ("exact rules are lost", "yield from self._exact.get(topic, ())", "yield from ()"),
    (
        "prefixes are lost",
        "[length].setdefault(pattern.prefix, [])",
        "[length].setdefault(b'', [])",
    ),
)

PATTERNS = mutants(
    "model/name_pattern.py",
    ("ends may overlap", "if len(name) < self._least_bytes:", "if False:"),
    ("pieces may overlap", "at = found + len(piece)", "at = found"),
    ("pieces reach into the end", "name.find(piece, at, end)", "name.find(piece, at)"),
)

IDENTITY = mutants(
    "model/identity.py",
    ("anonymous owns", "self.account is None or self.key", "self.key"),
    ("in doubt is anonymous, too", " and not self.is_in_doubt", ""),
    ("services do not matter", "(self.uid, self.service) ==", "(self.uid, creator.service) =="),
    ("keys do not matter", " or self.key != creator.key", ""),
)

JUDGING = mutants(
    "bus/policy_enforcer.py",
    ("old verdicts stay", "self._fanout.forget_verdicts()", "pass"),
    ("in doubt forever", " and not identity.is_in_doubt", ""),
    ("no peer is reclassified", "connection.source.reclassify(", "str("),
    ("what no peer reads is not judged", "= self._policy.has_rules_for(PRODUCE)", "= False"),
    ("subscriptions stay", "lost = self._subscriptions.end_denied(connection, may)", "lost = []"),
    ("Freud's subscriptions stay", "ended = self.topics.end_denied()", "ended = 0"),
)

QUOTAS = mutants(
    "bus/quotas.py",
    ("a trial is reported", "if not charged and not trial:", "if not charged:"),
    (
        "new quotas are for new accounts",
        "            self._limit(account)\n\n    def charge",
        "            pass\n\n    def charge",
    ),
    ("accounts stay forever", "        if account.is_empty:\n", "        if False:\n"),
    (
        "each charge has a row of its own",
        "account = self._accounts[identity.account] = QuotaAccount(",
        "account = QuotaAccount(",
    ),
    ("no peer is named", "user=self.describe(identity),", ""),
    ("overrides are no peer's", "self._own.get((key, quota))", "None"),
)

PEER = mutants(
    "transports/peer_identity.py",
    ("a successor is taken for the peer", " or state not in (ESTABLISHED, CLOSE_WAIT)", ""),
    ("asked beyond this machine", "if not is_own_address(far.ip):", "if False:"),
    (
        "own addresses are foreign",
        "errno.EADDRNOTAVAIL\n    return True",
        "errno.EADDRNOTAVAIL\n    return False",
    ),
    ("netlink is trusted blindly", "if _can_find_own_socket(diag):", "if True:"),
)

SOCKDIAG = mutants(
    "transports/socket_table.py",
    ("orphans are root's", "if inode and state", "if state"),
    ("listeners are peers", "inode and state in CONNECTED", "inode"),
    ("the ends are swapped", "self._sequence, *far, *near)", "self._sequence, *near, *far)"),
)

CREDENTIALS = mutants(
    "transports/unix_credentials.py",
    ("many groups are none", "if error.errno != errno.ERANGE:", "if True:"),
    ("the dead keep their service", '"" if _has_ended(handle) else service', "service"),
    ("the outermost unit", "in reversed(paths.get", "in iter(paths.get"),
)

ACL = mutants(
    "server/acl_admin.py",
    ("strangers set rules", "not rule.is_exact or not identity.owns", "False and identity.owns"),
    ("creators set patterns", "if not rule.is_exact or not", "if not"),
    ("creators set any verb", "if not CREATORS_VERBS.issuperset(rule.verbs):", "if False:"),
    ("creators remove admins' rules", "if by is not None and there.by is None:", "if False:"),
    ("partial admins make admins", "if ADMIN not in rule.verbs and", "if"),
    (
        "in force before it is kept",
        "        if self._path is not None:\n            try:",
        "        self._put_in_force(book)\n        if self._path is not None:\n            try:",
    ),
    ("strangers list", "if not self._may_list(identity, topic):", "if False:"),
    ("changes race", "self._turn = asyncio.Lock()", "self._turn = asyncio.Semaphore(99)"),
)

ACLFILE = mutants(
    "server/acl_file.py",
    ("written in place", "new = path.with_name(path.name + NEW_SUFFIX)", "new = path"),
    (
        "who set it is forgotten",
        'by = "" if kept.by is None else f"by = {json.dumps(kept.by)}\\n"',
        'by = ""',
    ),
)

ADMIN = mutants(
    "server/admin.py",
    ("answers overtake", "            or self._pending is not None\n", ""),
    ("a late answer is lost", "self._finishing = self._pending is not None", "pass"),
    ("waiting is silence", "self._pending is None and self._last_whole_s", "self._last_whole_s"),
)

ALL = [
    *(POLICY + RULETABLE + PATTERNS + IDENTITY + JUDGING + QUOTAS),
    *(PEER + SOCKDIAG + CREDENTIALS + ACL + ACLFILE + ADMIN),
]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-policy"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
