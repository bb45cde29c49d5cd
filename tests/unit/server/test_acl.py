"""Changing and testing rules: the right to do so, storage, and reload."""

from __future__ import annotations

import asyncio
import errno
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polybus.bus.admin_verb import AdminError
from polybus.bus.counters import Counters
from polybus.bus.policy import Policy
from polybus.bus.quotas import TOPICS, Quotas
from polybus.errors import ConfigError
from polybus.model.identity import Identity
from polybus.model.limits import QuotaLimits
from polybus.server import acl_admin as acl_module
from polybus.server import acl_file
from polybus.server.acl_admin import AclAdmin
from polybus.server.config import load
from tests.rig.memory_bus import RecordedLog

ROOT, OWNER = Identity(0), Identity(500)
ALICE = Identity(1000, gid=1000, groups=frozenset(), service="alice.service")
BOB = Identity(1001, gid=1001, groups=frozenset())
ME = pwd.getpwuid(os.getuid()).pw_name


class Bench:
    """A policy with its `AclAdmin`; alice has created the topic `hers`."""

    def __init__(self, folder: Path, config: str = "", *, keeps: bool = True) -> None:
        self.config_path = folder / "bus.toml"
        self.config_path.write_text(config)
        self.path = folder / "acl.toml"
        self.log = RecordedLog()
        self.policy = Policy((0, 500))
        self.quotas = Quotas(QuotaLimits(), Counters(), self.log)
        # Topic names have no star. If one had, a rule must still not use it as a pattern.
        self.creators = {b"hers": ALICE, b"her*": ALICE}
        path = self.path if keeps else None
        self.acl = AclAdmin(self.policy, self.quotas, self.creators.get, path, self.log)

    def start(self) -> Bench:
        self.loaded = load(self.config_path)
        self.acl.start(self.loaded)
        return self

    def ask(self, verb: str, identity: Identity = ROOT, **keys: Any) -> Any:
        async def asking() -> Any:
            found = self.acl.verbs()[verb].answer({"verb": verb, **keys}, identity)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run(asking())

    def add(self, rule: str, identity: Identity = ROOT) -> Any:
        return self.ask("acl_add", identity, rule=rule)

    def rm(self, rule: str, identity: Identity = ROOT) -> Any:
        return self.ask("acl_rm", identity, rule=rule)

    def reload(self) -> int:
        return asyncio.run(self.acl.reload(self.loaded))

    @property
    def rules(self) -> list[str]:
        return [str(placed.rule) for placed in self.policy.rules]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path).start()


def wrong(call: Callable[..., Any], *args: Any, **keys: Any) -> tuple[str, str]:
    with pytest.raises(AdminError) as caught:
        call(*args, **keys)
    return caught.value.code, str(caught.value)


PRODUCE = "allow user:1001 produce orders.*"


def test_added_rule_is_effective_and_stored_until_removed(bench, tmp_path):
    assert bench.add(PRODUCE) == {"rule": PRODUCE, "changed": True, "kept": True}
    assert not bench.policy.allows(ALICE, "produce", b"orders.eu")
    assert bench.add(PRODUCE)["changed"] is False
    again = Bench(tmp_path).start()
    assert again.rules == [PRODUCE]
    assert again.rm(PRODUCE)["changed"] is True
    assert again.policy.allows(ALICE, "produce", b"orders.eu")
    assert Bench(tmp_path).start().rules == []


def test_config_rules_come_first_and_cannot_be_removed(tmp_path):
    bench = Bench(tmp_path, 'acl = ["deny user:1 call *"]').start()
    bench.add(PRODUCE)
    assert bench.rules == ["deny user:1 call *", PRODUCE]
    assert bench.add("deny user:1 call *")["changed"] is False
    code, text = wrong(bench.rm, "deny user:1 call *")
    assert code == "refused"
    assert f"{bench.config_path}: remove it there" in text
    assert bench.ask("acl_ls") == [
        {
            "rule": "deny user:1 call *",
            "source": str(bench.config_path),
            "by": None,
            "names_nobody": False,
        },
        {"rule": PRODUCE, "source": "acl.toml", "by": None, "names_nobody": False},
    ]


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({}, "bad_request"),
        ({"rule": 5}, "bad_request"),
        ({"rule": ""}, "bad_request"),
        ({"rule": "\ud800"}, "bad_request"),
        ({"rule": "allow"}, "invalid_rule"),
        ({"rule": "allow user:no-such-user produce x"}, "not_found"),
        ({"rule": "allow group:no-such-group produce x"}, "not_found"),
    ],
)
def test_invalid_rule_changes_nothing(bench, keys: dict[str, Any], code: str):
    assert wrong(bench.ask, "acl_add", **keys)[0] == code
    assert bench.rules == []
    assert not bench.path.exists()


def test_removing_an_unknown_rule_is_an_error(bench):
    assert wrong(bench.rm, PRODUCE)[0] == "not_found"


def test_names_are_looked_up(bench):
    bench.add(f"deny user:{ME} produce t")
    assert not bench.policy.allows(Identity(os.getuid()), "produce", b"t")
    assert bench.policy.allows(Identity(os.getuid() + 1), "produce", b"t")


def test_rules_without_a_data_folder_last_until_the_bus_stops(tmp_path):
    bench = Bench(tmp_path, keeps=False).start()
    assert bench.add(PRODUCE)["kept"] is False
    assert bench.ask("acl_ls")[0]["source"] == "memory"
    assert not bench.path.exists()


def test_rule_that_cannot_be_written_is_not_applied(bench, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    bench.add(PRODUCE)
    monkeypatch.setattr(acl_file, "write_rules", full)
    for call, rule in ((bench.add, "deny user:1 call *"), (bench.rm, PRODUCE)):
        code, text = wrong(call, rule)
        assert code == "unavailable"
        assert "No space left" in text
    assert bench.rules == [PRODUCE]


def test_concurrent_changes_are_all_stored(bench, tmp_path):
    rules = [f"deny user:{n} produce t{n}" for n in range(30)]

    async def all_at_once() -> None:
        add = bench.acl.verbs()["acl_add"].answer
        await asyncio.gather(*(add({"rule": rule}, ROOT) for rule in rules))

    asyncio.run(all_at_once())
    assert sorted(Bench(tmp_path).start().rules) == sorted(rules)


# --- rights


HERS = "deny user:1001 produce hers"


@pytest.mark.parametrize(
    ("identity", "rule", "code"),
    [
        (ROOT, PRODUCE, None),
        (OWNER, PRODUCE, None),
        (BOB, PRODUCE, "denied"),
        (ALICE, PRODUCE, "denied"),
        (ALICE, HERS, None),
        (ALICE, "allow everyone subscribe,delete hers", None),
        (ALICE, "allow everyone create hers", "denied"),
        (ALICE, "allow user:1000 admin hers", "denied"),
        (ALICE, "deny user:1001 produce her*", "denied"),
        (ALICE, "deny user:1001 produce his", "denied"),
        (Identity(1000, service="other.service"), HERS, "denied"),
        (BOB, HERS, "denied"),
    ],
)
def test_rights_to_set_rules(bench, identity: Identity, rule: str, code: str | None):
    if code is None:
        assert bench.add(rule, identity)["changed"]
        assert bench.rm(rule, identity)["changed"]
    else:
        assert wrong(bench.add, rule, identity)[0] == code
        assert wrong(bench.rm, rule, identity)[0] == code
    assert bench.rules == []


def test_creator_cannot_remove_an_admins_rule(bench):
    bench.add(HERS)
    assert wrong(bench.rm, HERS, ALICE) == ("denied", "that rule was set by an admin")
    assert bench.add(HERS, ALICE)["changed"] is False
    bench.rm(HERS)
    bench.add(HERS, ALICE)
    bench.add(HERS, ROOT)  # it now belongs to the admin
    assert wrong(bench.rm, HERS, ALICE)[0] == "denied"


def test_rules_of_dead_letters_are_for_the_creator_of_their_topic(bench):
    bench.creators[b"hers.dlq"] = bench.creators[b"to-come.dlq"] = BOB
    assert bench.add("allow user:1001 subscribe hers.dlq", ALICE)["changed"] is True
    assert bench.rm("allow user:1001 subscribe hers.dlq", ALICE)["changed"] is True
    for topic in ("hers.dlq", "to-come.dlq"):
        code, _ = wrong(bench.add, f"allow user:1001 subscribe {topic}", BOB)
        assert code == "denied"
    assert bench.rules == []


def test_next_creator_of_a_name_may_remove_former_rules(bench, tmp_path):
    bench.add(HERS, ALICE)
    bench.creators[b"hers"] = BOB
    assert wrong(bench.rm, HERS, ALICE)[0] == "denied"
    assert bench.ask("acl_ls", BOB, topic="hers")[0]["by"] == 1000
    assert bench.rm(HERS, BOB)["changed"]


def test_admin_by_rule(bench):
    bench.add("allow user:1001 admin orders.*")
    assert not bench.acl.is_admin(BOB)
    assert bench.add("deny user:7 produce orders.eu.*", BOB)["changed"]
    assert bench.add("deny user:7 produce orders.*", BOB)["changed"]
    for beyond in ("deny user:7 produce *", "deny user:7 produce ord*", "deny user:7 produce x"):
        assert wrong(bench.add, beyond, BOB)[0] == "denied"
    assert wrong(bench.add, "allow user:1001 admin orders.x", BOB)[0] == "denied"
    bench.add("allow user:1001 admin *")
    assert bench.acl.is_admin(BOB)
    assert bench.add("allow user:7 admin *", BOB)["changed"]


def test_rights_to_list_rules(bench):
    bench.add(HERS)
    bench.add(PRODUCE)
    bench.add("allow everyone call *")
    assert len(bench.ask("acl_ls", OWNER)) == 3
    assert wrong(bench.ask, "acl_ls", ALICE)[0] == "denied"
    assert wrong(bench.ask, "acl_ls", ALICE, topic="orders.eu")[0] == "denied"
    hers = [one["rule"] for one in bench.ask("acl_ls", ALICE, topic="hers")]
    assert hers == [HERS, "allow everyone call *"]


def test_rule_table_is_bounded(bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acl_module, "MAX_CREATOR_RULES", 2)
    monkeypatch.setattr(acl_module, "MAX_RULES", 3)
    for uid in (1, 2):
        bench.add(f"deny user:{uid} produce hers", ALICE)
    assert wrong(bench.add, "deny user:3 produce hers", ALICE)[0] == "limit_reached"
    bench.add("deny user:3 produce hers")
    assert wrong(bench.add, "deny user:4 produce hers")[0] == "limit_reached"
    bench.rm("deny user:1 produce hers", ALICE)
    bench.add("deny user:4 produce hers", ALICE)


# --- testing


def test_acl_test_returns_verdict_and_rule(bench):
    bench.add(PRODUCE)
    question = {"action": "produce", "topic": "orders.eu"}
    assert bench.ask("acl_test", BOB, who="user:1001", **question) == {
        "allowed": True,
        "why": f'rule "{PRODUCE}" (acl.toml) names the caller',
        "rule": PRODUCE,
    }
    refused = bench.ask("acl_test", BOB, who="user:1000", **question)
    assert refused["allowed"] is False
    assert "names others, and no rule names this caller" in refused["why"]
    default = bench.ask("acl_test", BOB, who="anonymous", action="produce", topic="x")
    assert default == {
        "allowed": True,
        "why": "no rule speaks of it, and any caller may produce",
        "rule": None,
    }


@pytest.mark.parametrize(
    ("rule", "who", "allowed"),
    [
        ("deny group:5 produce t", "group:5", False),
        ("deny group:5 produce t", "group:6", True),
        ("deny group:5 produce t", "group:6,group:5", False),
        ("deny group:5 produce t", "user:7,group:5", False),
        ("deny service:x.service produce t", "service:x.service", False),
        ("deny service:x.service produce t", "user:7,service:x.service", False),
        ("deny user:7 produce t", "user:7,service:x.service", False),
        ("deny user:7 produce t", "user:7,key:k", True),  # the key wins
        ("deny key:k produce t", "key:k", False),
        ("deny anonymous produce t", "anonymous", False),
        ("deny anonymous produce t", "service:x", True),
        ("deny user:7 produce t", "in-doubt", False),
        ("allow user:7 produce t", "in-doubt", False),
        ("deny key:k produce t", "in-doubt", True),
        (f"deny user:{ME} produce t", f"user:{ME}", False),
        (f"deny group:{os.getgid()} produce t", f"user:{ME}", False),
    ],
)
def test_caller_forms_of_acl_test(bench, rule: str, who: str, allowed: bool):
    bench.add(rule)
    found = bench.ask("acl_test", who=who, action="produce", topic="t")
    assert found["allowed"] is allowed


def test_acl_test_knows_the_creator(bench):
    question = {"action": "delete", "topic": "hers"}
    assert bench.ask("acl_test", who="user:1000,service:alice.service", **question)["allowed"]
    assert not bench.ask("acl_test", who="user:1000", **question)["allowed"]


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"who": "alice", "action": "produce", "topic": "t"}, "bad_request"),
        ({"who": "", "action": "produce", "topic": "t"}, "bad_request"),
        ({"who": "everyone", "action": "produce", "topic": "t"}, "bad_request"),
        ({"who": "anonymous,user:5", "action": "produce", "topic": "t"}, "bad_request"),
        ({"who": "in-doubt,user:5", "action": "produce", "topic": "t"}, "bad_request"),
        ({"who": "user:5,user:6", "action": "produce", "topic": "t"}, "bad_request"),
        ({"who": "user:no-such-user", "action": "produce", "topic": "t"}, "bad_request"),
        ({"who": "user:5", "action": "write", "topic": "t"}, "bad_request"),
        ({"who": "user:5", "action": "produce", "topic": ""}, "bad_request"),
        ({"who": "user:5", "action": "produce"}, "bad_request"),
    ],
)
def test_invalid_acl_test_requests(bench, keys: dict[str, str], code: str):
    assert wrong(bench.ask, "acl_test", **keys)[0] == code


# --- starting and reloading


def test_reload_reads_config_and_acl_file(bench):
    bench.add(PRODUCE)
    bench.config_path.write_text(
        f'acl = ["deny user:1 call *"]\n[quotas]\nquota_topics = 7\nusers.{ME}.quota_topics = 9\n'
    )
    with bench.path.open("a") as file:
        file.write('\n[[acl]]\nrule = "deny user:2 call *"\n')
    assert bench.reload() == 3
    assert bench.rules == ["deny user:1 call *", PRODUCE, "deny user:2 call *"]
    assert bench.quotas.limit(5, TOPICS) == 7
    assert bench.quotas.limit(os.getuid(), TOPICS) == 9


@pytest.mark.parametrize("which", ["config", "file"])
def test_invalid_reload_changes_nothing(bench, which: str):
    bench.add(PRODUCE)
    bench.config_path.write_text('acl = ["deny user:1 call *"]\n[quotas]\nquota_topics = 7\n')
    broken = bench.config_path if which == "config" else bench.path
    broken.write_text("acl = [")
    with pytest.raises(ConfigError, match=str(broken)):
        bench.reload()
    assert bench.rules == [PRODUCE]
    assert bench.quotas.limit(5, TOPICS) == 4096
    if which == "file":
        bench.path.unlink()
        assert bench.reload() == 1
        assert bench.rules == ["deny user:1 call *"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('acl = ["deny user:no-such-user call *"]', "no user called 'no-such-user'"),
        ('acl = ["deny group:no-such call *"]', "no group called 'no-such'"),
        ("[quotas.users.no-such-user]\nquota_topics = 1", "no user called 'no-such-user'"),
        (f"[quotas.users]\n{ME} = {{}}\n{os.getuid()} = {{}}", "must appear once, got twice"),
    ],
)
def test_config_rule_with_unknown_user_is_refused(tmp_path, config: str, says: str):
    with pytest.raises(ConfigError, match=r"bus\.toml") as caught:
        Bench(tmp_path, config).start()
    assert says in str(caught.value)


def test_stored_rule_with_unknown_user_does_not_prevent_start(tmp_path):
    bench = Bench(tmp_path)
    bench.path.write_text('[[acl]]\nrule = "allow user:no-such-user produce t"\n')
    bench.start()
    assert not bench.policy.allows(ROOT, "produce", b"t")
    assert bench.ask("acl_ls")[0]["names_nobody"] is True
    assert [event for event, _ in bench.log.warnings()] == ["rule matches no caller"]
    bench.rm("allow user:no-such-user produce t")
    assert bench.policy.allows(ROOT, "produce", b"t")


NODE_ID = "0x" + "ab" * 20
NODE = Identity(node=NODE_ID)
CALL = f"allow node:{NODE_ID} call public/greeter"


def test_a_node_changes_rules_of_nodes_as_itself(bench, tmp_path):
    """The dialect that vouches for a node decides which rules it may name."""
    assert bench.add(CALL, NODE)["changed"]
    (line,) = [fields for event, fields in bench.log.events if event == "rule added"]
    assert line["user"] == f"node:{NODE_ID}"
    (row,) = bench.ask("acl_ls")
    assert row["by"] == f"node:{NODE_ID}"
    again = Bench(tmp_path).start()
    assert again.rm(CALL, Identity(node="0x" + "cd" * 20))["changed"]  # of any node


def test_a_node_changes_no_rule_of_others(tmp_path):
    config = f"deny node:{NODE_ID} call public/closed"
    bench = Bench(tmp_path, f'acl = ["{config}"]').start()
    bench.add(CALL)
    for rule in (CALL, config):
        code, text = wrong(bench.rm, rule, NODE)
        assert (code, text) == ("denied", "that rule was set by an admin")
    assert bench.add(CALL, NODE)["changed"] is False
    for rule in (PRODUCE, "allow everyone call public/x", "allow user:0 admin *"):
        code, text = wrong(bench.add, rule, NODE)
        assert (code, "for nodes only" in text) == ("denied", True)
        bench.add(rule)
        assert wrong(bench.rm, rule, NODE)[0] == "denied"
    assert [row["rule"] for row in bench.ask("acl_ls", NODE)] == [config, CALL]


def test_a_node_has_a_share_of_the_rules(bench, monkeypatch):
    monkeypatch.setattr(acl_module, "MAX_CREATOR_RULES", 2)
    for number in range(2):
        bench.add(f"{CALL}{number}", NODE)
    code, _ = wrong(bench.add, f"{CALL}2", NODE)
    assert code == "limit_reached"
    bench.add(f"{CALL}2", Identity(node="0x" + "cd" * 20))
