"""Identities for `polybus acl test`: the identity that a caller would have if it connected.

user:alice                           alice, with the groups that the host gives her
user:alice,service:backup.service    the same, running as that unit
group:staff                          a member of staff that no rule names
service:/usr/bin/x  key:K  node:0x…  anonymous
in-doubt                             a local TCP peer that has hung up: any user
"""

from __future__ import annotations

from polybus.bus.admin_verb import AdminError
from polybus.errors import InvalidRule
from polybus.model.access_rule import ANONYMOUS as ANONYMOUS_KIND
from polybus.model.access_rule import (
    EVERYONE,
    GROUP,
    KEY,
    MAX_NUMBER,
    NODE,
    SERVICE,
    USER,
    VERBS,
    Principal,
)
from polybus.model.identity import ANONYMOUS, IN_DOUBT, Identity
from polybus.server.rule_set import look_up_number, unknown_name_text
from polybus.server.user_directory import account_of

UNUSED_UID = MAX_NUMBER  # a uid that no host gives to anyone


def parse_caller(text: str) -> Identity:
    """Blocks, for the host's user database is asked."""
    if text.strip() == IN_DOUBT.name:  # not a principal: no rule can name it
        return IN_DOUBT
    parts = [_who(part) for part in text.split(",")]
    kinds = [part.kind for part in parts]
    if kinds == [ANONYMOUS_KIND]:
        return ANONYMOUS
    if kinds == [NODE]:
        return Identity(node=parts[0].name)
    once = [kind for kind in kinds if kind != GROUP]
    if {ANONYMOUS_KIND, EVERYONE, NODE}.intersection(kinds) or len(set(once)) < len(once):
        raise AdminError(
            "bad_request", f"caller must name one identity, such as user:alice, got {text!r}"
        )
    named = {part.kind: part.name for part in parts}
    users = [_number(part) for part in parts if part.kind == USER]
    uid = users[0] if users else UNUSED_UID
    groups = account_of(uid).groups | {_number(part) for part in parts if part.kind == GROUP}
    service, key = named.get(SERVICE, ""), named.get(KEY, "")
    return Identity(uid, groups=groups, service=service, key=key)


def check_verb(text: str) -> str:
    if text not in VERBS:
        raise AdminError(
            "bad_request", f"unknown verb {text[:64]!r}: the verbs are {', '.join(VERBS)}"
        )
    return text


def _who(text: str) -> Principal:
    try:
        return Principal.parse(text.strip())
    except InvalidRule as error:
        raise AdminError("bad_request", str(error)) from None


def _number(who: Principal) -> int:
    number = look_up_number(who)
    if number is None:
        raise AdminError(
            "bad_request", unknown_name_text(who)
        )  # no refusal: that would be an answer
    return number
