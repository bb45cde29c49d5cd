"""The policy, line by line; against a plain reading of its rules; and on a bus in memory."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.bus import policy as policy_module
from polybus.bus.policy import OVERFLOW, Policy
from polybus.bus.quotas import SUBSCRIPTIONS
from polybus.bus.rule_table import PlacedRule
from polybus.dialects.freud.server.pull_reader import PullReader
from polybus.model.access_rule import VERBS, Rule
from polybus.model.identity import ANONYMOUS, IN_DOUBT, Identity
from tests.rig.memory_bus import MemoryBus
from tests.rig.rqueue_client import notification, publish, subscribe

ALICE = Identity(1, gid=10, pid=100, groups=frozenset({20}), service="alice.service")
BOB = Identity(2, gid=10, pid=200, groups=frozenset(), service="/usr/bin/bob")
ROOT = Identity(0, gid=0, groups=frozenset())
OVER_TCP = Identity(2)
KEYED = Identity(1, gid=10, groups=frozenset({20}), service="alice.service", key="k1")
PROBE = b"_probe/" + bytes(16)


def placed(*lines: str) -> list[PlacedRule]:
    rules = [Rule.parse(line) for line in lines]
    return [PlacedRule(rule, "test", rule.who.number) for rule in rules]


def policy(*lines: str, **options: object) -> Policy:
    made = Policy(**options)  # type: ignore[arg-type]
    made.replace(placed(*lines))
    return made


def may(
    one: Policy, who: Identity, verb: str, topic: bytes = b"t", creator: Identity | None = None
) -> bool:
    """Return the verdict. Both queries must agree, and the reason must quote the deciding rule."""
    verdict = one.decide(who, verb, topic, creator)
    assert verdict.allowed is one.allows(who, verb, topic, creator)
    assert (verdict.by is not None) == verdict.why.startswith('rule "')
    if verdict.by is not None:
        assert str(verdict.by.rule) in verdict.why
    return verdict.allowed


# --- line by line


NODE_ID, OTHER_ID = "0x" + "a" * 40, "0x" + "b" * 40
NODE, OTHER_NODE = Identity(node=NODE_ID), Identity(node=OTHER_ID)


@pytest.mark.parametrize("verb", VERBS)
def test_node_may_do_nothing_without_a_rule_that_names_it(verb):
    assert not may(Policy(), NODE, verb)
    assert not may(Policy(), NODE, verb, creator=ANONYMOUS)
    assert not may(Policy(), NODE, verb, creator=NODE)
    assert not may(policy(f"allow everyone {verb} *"), NODE, verb)
    assert not may(policy(f"allow anonymous {verb} *"), NODE, verb)
    assert not may(policy(f"allow node:{OTHER_ID} {verb} *"), NODE, verb)
    assert may(policy(f"allow node:{NODE_ID} {verb} *"), NODE, verb)
    assert may(policy(f"allow node:* {verb} t"), NODE, verb)


def test_deny_rule_for_everyone_names_nodes_and_wins():
    rules = policy("allow node:* call public/*", "deny everyone call public/secret")
    assert may(rules, NODE, "call", b"public/x")
    assert not may(rules, NODE, "call", b"public/secret")
    assert not may(policy("allow node:* call *", f"deny node:{NODE_ID} call *"), NODE, "call")
    assert may(policy("allow node:* call *", f"deny node:{NODE_ID} call *"), OTHER_NODE, "call")


def test_rule_for_nodes_changes_nothing_for_other_callers():
    rules = policy("allow node:* call public/*", "deny node:* subscribe *")
    for who in (ALICE, OVER_TCP, KEYED, ANONYMOUS, IN_DOUBT):
        assert may(rules, who, "call", b"public/x")
        assert may(rules, who, "subscribe", b"public/x")


def test_rule_needs_more_than_the_prefix_of_its_pattern():
    rules = policy("deny everyone produce a*z")
    assert not may(rules, ALICE, "produce", b"a-z")
    assert may(rules, ALICE, "produce", b"a-b")


@pytest.mark.parametrize("who", [ALICE, BOB, ROOT, OVER_TCP, KEYED, ANONYMOUS])
@pytest.mark.parametrize("verb", VERBS)
def test_defaults(who: Identity, verb: str):
    allowed = verb in ("create", "produce", "subscribe", "call") or (
        verb == "admin" and who is ROOT
    )
    assert may(Policy(), who, verb) is allowed


def test_allow_rule_closes_the_verb_to_unnamed_callers():
    one = policy("allow user:1 produce orders.*")
    assert may(one, ALICE, "produce", b"orders.eu")
    assert not may(one, BOB, "produce", b"orders.eu")
    assert not may(one, ROOT, "produce", b"orders.eu")  # a uid like any other
    assert not may(one, ANONYMOUS, "produce", b"orders.eu")
    assert may(one, BOB, "produce", b"other")
    assert may(one, BOB, "subscribe", b"orders.eu")


def test_each_allow_rule_admits_the_callers_it_names():
    one = policy("allow user:1 produce orders.*", "allow user:2 produce *")
    assert may(one, ALICE, "produce", b"orders.eu")
    assert may(one, BOB, "produce", b"orders.eu")
    assert may(one, BOB, "produce", b"x")
    assert not may(one, ALICE, "produce", b"x")


def test_allow_everyone_opens_a_pattern_again():
    one = policy("allow user:1 subscribe *", "allow everyone subscribe news.*")
    assert may(one, ANONYMOUS, "subscribe", b"news.today")
    assert not may(one, ANONYMOUS, "subscribe", b"salaries")


def test_deny_wins_over_allow_in_any_order():
    for lines in (("deny user:1 produce t", "allow everyone produce *"),) * 2:
        assert not may(policy(*lines), ALICE, "produce")
        assert not may(policy(*reversed(lines)), ALICE, "produce")
        assert may(policy(*lines), BOB, "produce")


def test_deny_rule_does_not_affect_other_callers():
    assert may(policy("deny user:1 produce *"), BOB, "produce")


def test_only_the_creator_may_delete_by_default():
    assert may(Policy(), ALICE, "delete", creator=ALICE)
    assert not may(Policy(), BOB, "delete", creator=ALICE)
    assert not may(Policy(), ROOT, "delete", creator=ALICE)
    assert not may(Policy(), ANONYMOUS, "delete", creator=ANONYMOUS)


def test_allow_rule_does_not_remove_the_creators_right():
    one = policy("allow user:2 delete *")
    assert may(one, BOB, "delete", creator=ALICE)
    assert may(one, ALICE, "delete", creator=ALICE)
    assert not may(one, ROOT, "delete", creator=ALICE)


def test_deny_rule_removes_the_creators_right():
    assert not may(policy("deny user:1 delete t"), ALICE, "delete", creator=ALICE)
    assert not may(policy("deny everyone delete *"), ALICE, "delete", creator=ALICE)


def test_creator_has_no_other_right():
    one = policy("allow user:2 produce,subscribe t")
    assert not may(one, ALICE, "produce", creator=ALICE)
    assert not may(one, ALICE, "subscribe", creator=ALICE)


def test_admins_delete_where_admin_rights_count():
    one = policy("allow user:2 admin orders.*")
    for who, topic, allowed in ((ROOT, b"t", True), (BOB, b"orders.x", True), (BOB, b"t", False)):
        assert one.allows(who, "delete", topic, ALICE, as_admin=True) is allowed
        assert not one.allows(who, "delete", topic, ALICE)
    denied = policy("deny user:0 delete t")
    assert not denied.allows(ROOT, "delete", b"t", ALICE, as_admin=True)


def test_no_rule_denies_root_and_the_bus_user_admin():
    one = policy("deny everyone admin *", "allow user:1 admin *", admins=(0, 2))
    assert may(one, ROOT, "admin", b"")
    assert may(one, BOB, "admin", b"")
    assert not may(one, ALICE, "admin", b"")
    assert not may(one, Identity(0, key="k"), "admin", b"")  # a key replaces the uid


def test_admin_rule_on_a_bare_star_covers_the_whole_bus():
    assert may(policy("allow user:1 admin *"), ALICE, "admin", b"")
    assert not may(policy("allow user:1 admin a*"), ALICE, "admin", b"")
    assert may(policy("allow user:1 admin a*"), ALICE, "admin", b"abc")


def test_probe_topics_are_never_denied():
    one = policy("deny everyone produce,subscribe,create,call,delete *")
    for verb in ("produce", "subscribe", "create"):
        assert may(one, ANONYMOUS, verb, PROBE)
        assert not may(one, ANONYMOUS, verb, PROBE[:-1])
    number = one.classify(ANONYMOUS)
    assert one.may_produce(number, PROBE)
    assert one.may_subscribe(number, PROBE)
    assert not one.may_subscribe(number, b"t")


# --- principals of a rule


@pytest.mark.parametrize(
    ("who", "named"),
    [
        ("user:1", [ALICE]),
        ("user:2", [BOB, OVER_TCP]),
        ("group:10", [ALICE, BOB]),  # the main group of both
        ("group:20", [ALICE]),  # a supplementary one
        ("service:alice.service", [ALICE]),
        ("service:/usr/bin/bob", [BOB]),
        ("key:k1", [KEYED]),
        ("key:k2", []),
        ("anonymous", [ANONYMOUS]),
        ("everyone", [ALICE, BOB, ROOT, OVER_TCP, KEYED, ANONYMOUS]),
    ],
)
def test_rule_matches_its_principal(who: str, named: list[Identity]):
    one = policy(f"deny {who} produce t")
    for caller in (ALICE, BOB, ROOT, OVER_TCP, KEYED, ANONYMOUS):
        assert may(one, caller, "produce") is (caller not in named)


def test_unknown_principal_matches_no_caller_and_still_closes():
    one = Policy()
    rules = (Rule.parse("allow user:ghost produce t"), Rule.parse("deny group:ghosts subscribe t"))
    one.replace(PlacedRule(rule, "test", None) for rule in rules)
    for who in (ALICE, OVER_TCP, ANONYMOUS):
        assert not may(one, who, "produce")
        assert may(one, who, "subscribe")
    one.replace([PlacedRule(Rule.parse("allow user:ghost delete t"), "test", None)])
    assert not may(one, ANONYMOUS, "delete")


@pytest.mark.parametrize("groups", [frozenset({20}), frozenset(), None])
def test_groups_over_tcp_come_from_the_user_database(groups: frozenset[int] | None):
    lines = ("deny group:20 produce t", "allow group:20 subscribe t")
    one = policy(*lines, groups_of=lambda uid: groups)
    assert may(one, OVER_TCP, "produce") is (groups == frozenset())  # in doubt, a member
    assert may(one, OVER_TCP, "subscribe") is (groups == frozenset({20}))  # in doubt, none
    assert may(one, ALICE, "subscribe")


def test_user_database_is_asked_for_group_rules_only():
    asked: list[int] = []
    answers: list[frozenset[int] | None] = [None, frozenset({20})]

    def groups_of(uid: int) -> frozenset[int] | None:
        asked.append(uid)
        return answers[min(len(asked), len(answers)) - 1]

    one = policy("deny user:9 produce t", groups_of=groups_of)
    one.classify(OVER_TCP)
    assert asked == []
    one.replace(placed("allow group:20 produce t"))
    assert [one.allows(OVER_TCP, "produce", b"t") for _ in range(3)] == [False, True, True]
    assert asked == [2, 2]


@pytest.mark.parametrize(
    ("who", "denied"),
    [
        ("user:1", True),
        ("user:0", True),
        ("group:20", True),
        ("service:alice.service", True),
        ("anonymous", True),
        ("everyone", True),
        ("key:k1", False),  # a peer proves its key
    ],
)
def test_caller_in_doubt_gets_every_deny_and_only_the_allow_for_everyone(who: str, denied: bool):
    one = policy(f"deny {who} produce t", f"allow {who} subscribe t", f"allow {who} delete t")
    assert may(one, IN_DOUBT, "produce") is not denied
    assert may(one, IN_DOUBT, "subscribe") is (who == "everyone")
    assert not may(one, IN_DOUBT, "delete", creator=IN_DOUBT) or who == "everyone"
    assert may(one, IN_DOUBT, "produce", b"other")
    number = one.classify(IN_DOUBT)
    assert one.may_produce(number, b"t") is not denied
    assert one.may_subscribe(number, b"t") is (who == "everyone")


def test_caller_in_doubt_is_not_named_by_a_user_unknown_to_the_host():
    one = Policy()
    for line in ("deny user:ghost produce t", "deny group:ghosts produce t"):
        one.replace([PlacedRule(Rule.parse(line), "test", None)])
        assert may(one, IN_DOUBT, "produce")


def test_caller_in_doubt_is_not_an_admin_and_owns_nothing():
    one = Policy()
    assert not may(one, IN_DOUBT, "admin")
    for creator in (IN_DOUBT, ANONYMOUS, ROOT):
        assert not may(one, IN_DOUBT, "delete", creator=creator)
    one.replace(placed("allow anonymous admin *"))
    assert not may(one, IN_DOUBT, "admin")


def test_verdict_says_that_the_caller_is_in_doubt():
    verdict = policy("deny user:1 produce t").decide(IN_DOUBT, "produce", b"t")
    rule = 'rule "deny user:1 produce t" (test)'
    assert verdict.why == f"{rule} may name the caller, which is in doubt"


# --- classes


def test_callers_matched_by_the_same_rules_share_a_class():
    one = Policy()
    everybody = [ALICE, BOB, ROOT, OVER_TCP, KEYED, ANONYMOUS]
    assert len({one.classify(who) for who in everybody}) == 2  # root is an admin
    one.replace(placed("allow user:1 produce x", "deny group:10 subscribe y"))
    assert len({one.classify(who) for who in everybody}) == 4
    for number in range(500):
        other = Identity(5000 + number, service=f"s{number}")
        assert one.classify(other) == one.classify(ANONYMOUS)


def test_overflow_class_gets_every_deny_and_no_allow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy_module, "MAX_CLASSES", 3)
    one = policy(
        *(f"allow user:{n} produce t" for n in range(1, 9)),
        "deny user:8 subscribe t",
    )
    numbers = [one.classify(Identity(uid)) for uid in range(1, 9)]
    assert numbers == [1, 2, *[OVERFLOW] * 6]
    assert one.may_produce(1, b"t")
    assert not one.may_produce(OVERFLOW, b"t")
    assert not one.may_subscribe(OVERFLOW, b"t")
    assert one.may_subscribe(OVERFLOW, b"other")


def test_watchers_are_called_after_a_change():
    one, calls = Policy(), []
    one.on_change(lambda: calls.append(len(one.rules)))
    one.replace(placed("deny user:1 produce x"))
    one.replace([])
    assert calls == [1, 0]
    assert not one.has_rules_for("produce")


# --- against a plain reading of the rules

NAMES = ["a", "b", "ab", "ba", "aab"]
PATTERNS = ["*", "a", "a*", "*b", "ab", "*a*", "a*b"]
PEOPLE = [ALICE, BOB, ROOT, KEYED, ANONYMOUS, IN_DOUBT]
WHOS = ["user:1", "user:2", "user:0", "group:10", "group:20", "key:k1", "anonymous", "everyone"]
WHOS += ["service:alice.service"]
LINES = st.builds(
    "{} {} {} {}".format,
    st.sampled_from(["allow", "deny"]),
    st.sampled_from(WHOS),
    st.lists(st.sampled_from(VERBS[:4]), min_size=1, max_size=2).map(",".join),
    st.sampled_from(PATTERNS),
)
NAMED: dict[str, Callable[[Identity], bool]] = {
    "user:1": lambda who: who is ALICE,
    "user:2": lambda who: who is BOB,
    "user:0": lambda who: who is ROOT,
    "group:10": lambda who: who in (ALICE, BOB),
    "group:20": lambda who: who is ALICE,
    "service:alice.service": lambda who: who is ALICE,
    "key:k1": lambda who: who is KEYED,
    "anonymous": lambda who: who is ANONYMOUS,
    "everyone": lambda who: True,
}


def plainly(lines: list[str], who: Identity, verb: str, topic: str, creator: Identity) -> bool:
    """The specification's sentences, one after another."""
    words = [line.split() for line in lines]
    about = [w for w in words if verb in w[2].split(",") and fnmatch.fnmatchcase(topic, w[3])]
    naming = {w[0] for w in about if NAMED[w[1]](who)}
    if who is IN_DOUBT:  # every deny but those of keys counts
        naming |= {w[0] for w in about if w[0] == "deny" and not w[1].startswith("key:")}
    if "deny" in naming:
        return False
    if verb == "delete" and who is creator and who not in (ANONYMOUS, IN_DOUBT):
        return True
    if any(w[0] == "allow" for w in about):
        return "allow" in naming
    return verb != "delete"


@given(
    st.lists(LINES, max_size=6),
    st.sampled_from(PEOPLE),
    st.sampled_from(VERBS[:4]),
    st.sampled_from(NAMES),
    st.sampled_from(PEOPLE),
)
def test_policy_agrees_with_a_plain_model(
    lines: list[str], who: Identity, verb: str, topic: str, creator: Identity
):
    one = policy(*lines)
    expected = plainly(lines, who, verb, topic, creator)
    assert may(one, who, verb, topic.encode(), creator=creator) is expected
    number = one.classify(who)
    if verb == "produce":
        assert one.may_produce(number, topic.encode()) is expected
    if verb == "subscribe":
        assert one.may_subscribe(number, topic.encode()) is expected


# --- on a bus


def test_denied_publish_is_counted_and_logged_once_per_topic():
    bus = MemoryBus()
    reader, writer = bus.connect(identity=BOB), bus.connect(identity=ALICE)
    reader.deliver(subscribe(b"t"))
    bus.broker.policy.replace(placed("deny user:1 produce t"))
    writer.deliver(publish(b"t", b"1") * 3 + publish(b"u", b"2"))
    reader.deliver(publish(b"t", b"mine"))
    assert reader.taken == notification(b"t", b"mine")
    assert bus.stats("dropped") == {"denied": 3, "no_subscriber": 1}
    fields = {"dialect": "rqueue", "peer": writer.peer, "user": "uid:1", "topic": "t"}
    assert bus.log.warnings() == [
        ("refused", {"level": "warning", **fields, "reason": "produce_denied"})
    ]
    assert not writer.closed


def test_denied_subscribe_is_counted_and_logged():
    bus = MemoryBus()
    bus.broker.policy.replace(placed("allow user:2 subscribe *"))
    reader, stranger, writer = bus.connect(identity=BOB), bus.connect(identity=ALICE), bus.connect()
    for pipe in (reader, stranger):
        pipe.deliver(subscribe(b"\xfft"))
    writer.deliver(publish(b"\xfft", b"1"))
    assert reader.taken == notification(b"\xfft", b"1")
    assert stranger.taken == b""
    assert not stranger.closed
    assert bus.stats("refused") == {"subscribe_denied": 1}
    assert [fields["topic"] for _, fields in bus.log.warnings()] == ["\\xfft"]


def test_publish_without_subscribers_is_denied_by_a_produce_rule():
    bus = MemoryBus()
    writer = bus.connect(identity=ALICE)
    writer.deliver(publish(b"t", b"1"))
    bus.broker.policy.replace(placed("deny user:1 produce t"))
    writer.deliver(publish(b"t", b"1"))
    bus.broker.policy.replace(placed("deny user:1 subscribe t"))
    writer.deliver(publish(b"t", b"1"))
    assert bus.stats("dropped") == {"denied": 1, "no_subscriber": 2}


def test_rule_change_applies_to_open_connections():
    bus = MemoryBus()
    reader, writer = bus.connect(identity=BOB), bus.connect(identity=ALICE)
    reader.deliver(subscribe(b"t"))
    changes: tuple[list[str], ...] = (
        [],
        ["deny user:1 produce t"],
        ["deny user:2 produce t"],
        ["allow user:2 produce *"],
    )
    for lines in changes:
        bus.broker.policy.replace(placed(*lines))
        writer.deliver(publish(b"t", b"%d" % len(lines)))
        bus.turn()
    assert reader.taken == notification(b"t", b"0") + notification(b"t", b"1")
    assert bus.connections()[1]["received_messages"] == 4


def test_subscription_ends_when_its_right_is_revoked():
    bus = MemoryBus()
    alice, bob, writer = bus.connect(identity=ALICE), bus.connect(identity=BOB), bus.connect()
    for pipe in (alice, bob):
        pipe.deliver(subscribe(b"t") + subscribe(b"u") + subscribe(PROBE))
    bus.broker.policy.replace(placed("allow user:2 subscribe t"))
    writer.deliver(publish(b"t", b"1") + publish(b"u", b"2") + publish(PROBE, b"3"))
    rest = notification(b"u", b"2") + notification(PROBE, b"3")
    assert alice.taken == rest
    assert bob.taken == notification(b"t", b"1") + rest
    assert bus.stats("refused") == {"subscription_revoked": 1}
    assert bus.stats("subscriptions") == 5
    assert [event for event, _ in bus.log.warnings()] == ["subscriptions revoked"]
    bus.broker.policy.replace([])  # it does not come back by itself
    writer.deliver(publish(b"t", b"4"))
    assert alice.taken == rest
    alice.deliver(subscribe(b"t"))
    writer.deliver(publish(b"t", b"5"))
    bus.turn()
    assert alice.taken == rest + notification(b"t", b"5")


def test_revoked_freud_subscription_ends_and_answers_its_waiter():
    bus = MemoryBus()
    topics = bus.topics
    topics.create(BOB, b"t")
    readers = [topics.subscribe(who, b"t") for who in (ALICE, BOB)]
    alice, bob = (reader for reader in readers if isinstance(reader, PullReader))
    calls: list[bool] = []
    alice.wait(lambda: calls.append(alice.gone))
    bus.broker.policy.replace(placed("deny user:1 subscribe t"))
    assert calls == [True]
    assert alice.id not in topics.readers.by_id
    assert topics.readers.by_id[bob.id] is bob
    assert bus.stats("refused") == {"subscription_revoked": 1}
    assert bus.broker.quotas.used(1, SUBSCRIPTIONS) == 0


def test_connection_in_doubt_is_classified_again():
    known: dict[int, frozenset[int]] = {}
    bus = MemoryBus(policy=Policy(groups_of=known.get))
    bus.broker.policy.replace(placed("deny group:20 produce t"))
    reader, writer, gone = (bus.connect(identity=who) for who in (BOB, OVER_TCP, OVER_TCP))
    reader.deliver(subscribe(b"t"))
    gone.hang_up()
    for text in (b"1", b"2", b"3", b"4"):
        writer.deliver(publish(b"t", text))
        if text == b"2":
            known[2] = frozenset({10})
        bus.pass_time(0.25)
    assert reader.taken == notification(b"t", b"3") + notification(b"t", b"4")
    assert bus.stats("dropped") == {"denied": 2}


def test_peer_in_doubt_stays_in_its_class():
    """Its user will not become known, unlike groups: it is not classified at every tick."""
    classified: list[Identity] = []

    class Counting(Policy):
        def classify(self, identity: Identity) -> int:
            classified.append(identity)
            return super().classify(identity)

    bus = MemoryBus(policy=Counting())
    bus.broker.policy.replace(placed("deny user:1 produce,subscribe t"))
    reader, writer = bus.connect(identity=BOB), bus.connect(identity=IN_DOUBT)
    reader.deliver(subscribe(b"t") + subscribe(b"open"))
    writer.deliver(publish(b"t", b"1") + publish(b"open", b"2") + subscribe(b"t"))
    for _ in range(10):
        bus.pass_time(0.25)
    assert reader.taken == notification(b"open", b"2")
    assert classified.count(IN_DOUBT) == 1
    assert bus.stats("refused") == {"subscribe_denied": 1}
    assert bus.stats("connections")["in_doubt"] == {"rqueue": 1}
    bus.broker.policy.replace(placed())
    writer.deliver(publish(b"t", b"3"))
    assert reader.taken.endswith(notification(b"t", b"3"))
