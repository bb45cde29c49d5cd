"""Dead letters inherit the rules of their topic; reserved topics belong to the bus."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.bus.policy import OVERFLOW, Policy
from polybus.bus.rule_table import PlacedRule
from polybus.model import topic_name
from polybus.model.access_rule import VERBS, Rule
from polybus.model.identity import ANONYMOUS, Identity
from tests.rig.memory_bus import MemoryBus
from tests.rig.rqueue_client import publish, subscribe

ALICE, BOB, CAROL, ROOT = Identity(1), Identity(2), Identity(3), Identity(0)
ORDERS, LETTERS, CALLS = b"orders", b"orders.dlq", b"gsb.calls"
RESERVED = {CALLS.decode(): "the log"}


def placed(*lines: str) -> list[PlacedRule]:
    rules = [Rule.parse(line) for line in lines]
    return [PlacedRule(rule, "test", rule.who.number) for rule in rules]


def policy(*lines: str) -> Policy:
    made = Policy(reserved=RESERVED)
    made.replace(placed(*lines))
    return made


# --- names


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (b"orders.dlq", b"orders"),
        (b"orders.dlq.dlq", b"orders"),
        (b"a.b.dlq", b"a.b"),
        (b"orders", None),
        (b"orders.dlq.requeued", None),
        (b"ordersdlq", None),
        (b".dlq", None),
        (b".dlq.dlq", None),
        (b"", None),
    ],
)
def test_source_of_dead_letters(name: bytes, source: bytes | None):
    assert topic_name.dead_letter_source(name) == source


# --- dead letters


@pytest.mark.parametrize("verb", ["create", "subscribe", "produce", "delete"])
def test_deny_rule_of_a_topic_denies_its_dead_letters(verb: str):
    one = policy(f"deny user:2 {verb} orders")
    verdict = one.decide(BOB, verb, LETTERS, BOB)
    assert not verdict.allowed
    assert verdict.why == f'rule "deny user:2 {verb} orders" (test) names the caller'
    assert not one.allows(BOB, verb, b"orders.dlq.dlq", BOB)


def test_allow_rule_of_a_topic_closes_its_dead_letters():
    one = policy("allow user:1 subscribe orders")
    assert one.decide(ALICE, "subscribe", LETTERS).by is one.rules[0]
    refused = one.decide(BOB, "subscribe", LETTERS)
    assert not refused.allowed
    assert "allow user:1 subscribe orders" in refused.why
    assert one.allows(BOB, "subscribe", b"other.dlq")


def test_admin_of_a_topic_is_an_admin_of_its_dead_letters():
    one = policy("allow user:1 admin orders", "allow user:2 delete orders")
    assert one.allows(ALICE, "admin", LETTERS)
    assert one.allows(ALICE, "delete", LETTERS, as_admin=True)
    assert one.allows(BOB, "delete", LETTERS)
    assert not one.allows(BOB, "admin", LETTERS)
    assert not one.allows(CAROL, "delete", LETTERS)


@pytest.mark.parametrize("pattern", ["orders.dlq", "*.dlq", "o*.dlq"])
def test_allow_rule_for_dead_letters_takes_over(pattern: str):
    one = policy("allow user:1 subscribe orders", f"allow user:2 subscribe {pattern}")
    assert one.allows(BOB, "subscribe", LETTERS)
    assert not one.allows(ALICE, "subscribe", LETTERS)  # the rule names others
    assert not one.allows(BOB, "subscribe", ORDERS)
    assert one.allows(ALICE, "subscribe", ORDERS)


def test_wide_allow_rule_does_not_open_the_dead_letters_of_a_closed_topic():
    one = policy("allow user:1 subscribe orders", "allow user:2 subscribe orders.*")
    assert not one.allows(BOB, "subscribe", LETTERS)
    assert one.allows(BOB, "subscribe", b"orders.eu")


def test_deny_rule_for_dead_letters_does_not_open_them():
    """A deny rule that took over would drop the allow rule that closes them."""
    one = policy("allow user:1 subscribe orders", "deny user:2 subscribe *.dlq")
    assert not one.allows(CAROL, "subscribe", LETTERS)
    assert not one.allows(BOB, "subscribe", LETTERS)
    assert one.allows(ALICE, "subscribe", LETTERS)


def test_deny_rule_of_the_topic_wins_over_an_allow_rule_for_its_dead_letters():
    one = policy("deny user:2 subscribe orders", "allow everyone subscribe orders.dlq")
    assert not one.allows(BOB, "subscribe", LETTERS)
    assert one.allows(CAROL, "subscribe", LETTERS)


def test_deny_rule_of_the_topic_removes_the_creators_right_to_its_dead_letters():
    one = policy("deny user:2 delete orders", "allow user:1 delete orders.dlq")
    assert not one.allows(BOB, "delete", LETTERS, BOB)


def test_only_admins_and_named_callers_produce_to_dead_letters():
    assert not policy().allows(ALICE, "produce", LETTERS)
    assert not policy("allow user:1 produce *").allows(ALICE, "produce", LETTERS)
    assert not policy("allow user:1 produce orders").allows(ALICE, "produce", LETTERS)
    assert policy("allow user:1 produce *.dlq").allows(ALICE, "produce", LETTERS)
    assert policy().allows(ROOT, "produce", LETTERS)
    assert policy("allow user:1 admin orders").allows(ALICE, "produce", LETTERS)
    assert not policy("deny user:0 produce orders").allows(ROOT, "produce", LETTERS)
    assert policy().allows(ALICE, "subscribe", LETTERS)
    assert policy().allows(ALICE, "create", LETTERS)


# --- reserved topics


@pytest.mark.parametrize("who", [ALICE, ROOT, ANONYMOUS])
@pytest.mark.parametrize("verb", ["create", "produce"])
def test_only_the_bus_writes_a_reserved_topic(who: Identity, verb: str):
    for one in (policy(), policy(f"allow everyone {verb},admin gsb.calls")):
        assert not one.allows(who, verb, CALLS, who)
        assert "only the bus" in one.decide(who, verb, CALLS).why


@pytest.mark.parametrize("verb", ["subscribe", "delete"])
def test_admins_read_and_remove_a_reserved_topic(verb: str):
    assert policy().allows(ROOT, verb, CALLS)
    assert not policy().allows(ALICE, verb, CALLS)
    assert not policy(f"allow everyone {verb} *").allows(ALICE, verb, CALLS)
    assert not policy(f"allow everyone {verb} gsb.*").allows(ALICE, verb, CALLS)
    assert policy("allow user:1 admin gsb.*").allows(ALICE, verb, CALLS)
    one = policy(f"allow user:1 {verb} gsb.calls")
    assert [one.allows(who, verb, CALLS) for who in (ALICE, BOB, ROOT)] == [True, False, True]
    assert not policy(f"deny user:0 {verb} gsb.*").allows(ROOT, verb, CALLS)


def test_overflow_class_has_no_rights_on_restricted_topics():
    one = policy("allow everyone subscribe gsb.calls", "allow everyone produce *.dlq")
    assert not one.may_subscribe(OVERFLOW, CALLS)
    assert not one.may_produce(OVERFLOW, LETTERS)
    assert one.may_produce(one.classify(BOB), LETTERS)


def test_lost_right_to_a_reserved_topic_ends_the_subscription():
    """Also if no rule about subscribing is left."""
    bus = MemoryBus(policy=policy("allow user:2 subscribe gsb.calls"))
    reader = bus.connect(identity=BOB)
    reader.deliver(subscribe(CALLS))
    assert bus.broker.fanout.subscriber_count(CALLS) == 1
    bus.broker.policy.replace([])
    assert bus.broker.fanout.subscriber_count(CALLS) == 0


def test_publish_to_dead_letters_and_reserved_topics_reaches_no_reader():
    bus = MemoryBus(policy=policy())
    reader, writer = bus.connect(identity=ROOT), bus.connect(identity=BOB)
    for topic in (LETTERS, CALLS):
        reader.deliver(subscribe(topic))
        writer.deliver(publish(topic, b"forged"))
    bus.turn()
    assert bus.stats("dropped", "denied") == 2


# --- against a plain reading of the rules

NAMES = ["a", "a.dlq", "a.dlq.dlq", "b.dlq", "gsb.calls"]
PATTERNS = ["*", "a", "a*", "*.dlq", "a.dlq", "b", "*q", "gsb.*", "gsb.calls"]
PEOPLE = {"user:1": ALICE, "user:2": BOB, "user:0": ROOT, "anonymous": ANONYMOUS}
LINES = st.builds(
    "{} {} {} {}".format,
    st.sampled_from(["allow", "deny"]),
    st.sampled_from([*PEOPLE, "everyone"]),
    st.lists(st.sampled_from(VERBS), min_size=1, max_size=2).map(",".join),
    st.sampled_from(PATTERNS),
)


def plainly(lines: list[str], who: Identity, verb: str, topic: str, creator: Identity) -> bool:
    """Return the verdict by the sentences of docs/guides/policy.md, one after another."""
    if topic in RESERVED and verb in ("create", "produce"):
        return False
    if verb == "admin" and who is ROOT:
        return True
    words = [line.split() for line in lines if verb in line.split()[2].split(",")]
    source = topic.removesuffix(".dlq").removesuffix(".dlq")
    names = [topic] if verb == "call" or source == topic else [topic, source]

    def mine(effect: str, name: str, *, itself: bool = False) -> list[list[str]]:
        return [
            word
            for word in words
            if word[0] == effect
            and fnmatch.fnmatchcase(name, word[3])
            and (word[1] == "everyone" or PEOPLE[word[1]] is who)
            and (not itself or "*" not in word[3] or word[3].endswith(".dlq"))
        ]

    def is_closed(name: str) -> bool:
        return any(word[0] == "allow" and fnmatch.fnmatchcase(name, word[3]) for word in words)

    if any(mine("deny", name) for name in names):
        return False
    if verb == "delete" and who is creator and who is not ANONYMOUS:
        return True
    is_named = bool(mine("allow", topic, itself=True))
    restricted = (topic in RESERVED and verb in ("subscribe", "delete")) or (
        topic != source and verb == "produce"
    )
    if restricted:
        return is_named or plainly(lines, who, "admin", topic, creator)
    judged = [topic] if is_named else names
    if any(is_closed(name) and not mine("allow", name) for name in judged):
        return False
    return any(mine("allow", name) for name in names) or verb not in ("delete", "admin")


@given(
    st.lists(LINES, max_size=6),
    st.sampled_from(list(PEOPLE.values())),
    st.sampled_from(VERBS),
    st.sampled_from(NAMES),
    st.sampled_from(list(PEOPLE.values())),
)
def test_policy_agrees_with_a_plain_model(
    lines: list[str], who: Identity, verb: str, topic: str, creator: Identity
):
    one, raw = policy(*lines), topic.encode()
    expected = plainly(lines, who, verb, topic, creator)
    verdict = one.decide(who, verb, raw, creator)
    assert verdict.allowed is one.allows(who, verb, raw, creator) is expected
    assert (verdict.by is not None) == verdict.why.startswith('rule "')
    number = one.classify(who)
    if verb == "produce":
        assert one.may_produce(number, raw) is expected
    if verb == "subscribe":
        assert one.may_subscribe(number, raw) is expected


@given(
    st.lists(LINES, max_size=6),
    st.sampled_from(list(PEOPLE.values())),
    st.sampled_from(["subscribe", "produce"]),
)
def test_caller_denied_on_a_topic_is_denied_on_its_dead_letters(
    lines: list[str], who: Identity, verb: str
):
    """Unless an allow rule for the dead letters names the caller, or it is an admin of them."""
    named = [line for line in lines if line.startswith("allow") and line.endswith(".dlq")]
    one = policy(*lines)
    if named or one.allows(who, "admin", b"a.dlq"):
        return
    if not one.allows(who, verb, b"a"):
        assert not one.allows(who, verb, b"a.dlq")


@pytest.mark.parametrize("verb", ["create", "subscribe", "produce", "delete"])
def test_dead_letters_of_a_reserved_topic_are_reserved(verb: str):
    one = policy()
    assert not one.allows(BOB, verb, b"gsb.calls.dlq")
    assert one.allows(ROOT, "subscribe", b"gsb.calls.dlq")
