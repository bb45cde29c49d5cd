"""Actions on the policy's rules: for admins, and for topics that the caller created.

Who may do what is decided where the rules are kept, as for `polybus acl`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.native.protocol.fields import ActionSchema, Answer, Arguments, Field

if TYPE_CHECKING:
    from polybus.native.port.native_port import Caller, NativePort

RULE = Field("rule", "text", "as in: deny user:bob produce orders")


def _ls(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    about = {"topic": given["topic"]} if given["topic"] else {}
    return {"rules": port.rules("acl_ls", about, caller.identity)}


def _add(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    return dict(port.rules("acl_add", given, caller.identity))


def _rm(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    return dict(port.rules("acl_rm", given, caller.identity))


def _test(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    return dict(port.rules("acl_test", given, caller.identity))


ACTIONS = {
    ActionSchema(
        "acl.ls",
        "The rules that speak of a topic (its creator, admins)",
        (Field("topic", "text", "its name; without one, all rules (admins)", ""),),
        "rules: rule, source, by, names_nobody each",
    ): _ls,
    ActionSchema(
        "acl.add",
        "Sets a rule (a topic's creator for produce, subscribe and delete of it; admins)",
        (RULE,),
        "rule, changed, kept",
    ): _add,
    ActionSchema("acl.rm", "Removes a rule that was set so", (RULE,), "rule, changed, kept"): _rm,
    ActionSchema(
        "acl.test",
        "Would it be allowed, and which rule decides?",
        (
            Field("who", "text", "user:NAME, group:NAME, service:NAME, key:NAME or anonymous"),
            Field("action", "text", "create, produce, subscribe, delete, call or admin"),
            Field("topic", "text", "its name"),
        ),
        "allowed, why, rule",
    ): _test,
}
