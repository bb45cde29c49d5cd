"""`polybus acl ls|add|rm|test`: manage the access rules of the running bus.

polybus acl add allow user:alice produce,subscribe 'orders.*'
polybus acl test user:bob produce orders.eu
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from polybus.cli import flags
from polybus.cli.admin_request import ask_admin
from polybus.cli.text_table import print_table
from polybus.errors import InvalidRule
from polybus.model.access_rule import WORDS, Rule

DENIED = 4  # the exit code of any refusal
TEST_HELP = f"Show whether WHO may do VERB (exit code 0, else {DENIED}) and the deciding rule."

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="EFFECT WHO VERBS PATTERN", help="The rule, as four words or one quoted word."
    ),
]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    group.command("ls", help="List the rules in force.")(ls)
    group.command("add", help="Add a rule; it survives a restart.")(add)
    group.command("rm", help="Remove an added rule.")(rm)
    group.command("test", help=TEST_HELP)(explain)
    root.add_typer(group, name=name, help=help_line)


def ls(
    topic: Annotated[
        str | None, typer.Argument(help="Only rules that apply to this topic.")
    ] = None,
    as_json: flags.Json = False,
    admin: flags.Admin = None,
) -> None:
    reply = ask_admin("acl_ls", admin, **({"topic": topic} if topic else {}))
    if as_json:
        print(json.dumps(reply, indent=2))
    elif reply:
        print_table(("effect", "who", "verbs", "pattern", "written in"), map(_row, reply))
    else:
        print("no rules")


def add(words: Words, admin: flags.Admin = None) -> None:
    reply = ask_admin("acl_add", admin, rule=_rule(words))
    lasting = "" if reply["kept"] else " (until this bus stops: it has no data folder)"
    print(f"{'added' if reply['changed'] else 'already there'}: {reply['rule']}{lasting}")


def rm(words: Words, admin: flags.Admin = None) -> None:
    print(f"removed: {ask_admin('acl_rm', admin, rule=_rule(words))['rule']}")


def explain(
    who: Annotated[
        str, typer.Argument(help="E.g. user:alice, anonymous, in-doubt, user:5,service:x.")
    ],
    verb: Annotated[str, typer.Argument(help="create, produce, subscribe, delete, call, admin.")],
    topic: Annotated[str, typer.Argument(help="Name of a topic.")],
    as_json: flags.Json = False,
    admin: flags.Admin = None,
) -> int:
    reply = ask_admin("acl_test", admin, who=who, action=verb, topic=topic)
    if as_json:
        print(json.dumps(reply, indent=2))
    else:
        print(f"{'allowed' if reply['allowed'] else 'denied'}: {reply['why']}")
    return 0 if reply["allowed"] else DENIED


def _rule(words: list[str]) -> str:
    """Check a rule before it is sent, so that a mistake is reported even if no bus runs.

    Raises InvalidRule.
    """
    if len(words) == 1:
        return str(Rule.parse(words[0]))
    if len(words) != 4:
        raise InvalidRule(f"a rule must have four words ({WORDS}), got {len(words)}")
    return str(Rule.from_words(*words))


def _row(found: dict[str, Any]) -> list[str]:
    rule = Rule.parse(found["rule"])
    setter = found["by"]  # None for an admin
    by = "" if setter is None else f" by {setter if isinstance(setter, str) else f'uid {setter}'}"
    unknown = " (this host knows no such name)" if found["names_nobody"] else ""
    return [
        rule.effect,
        str(rule.who) + unknown,
        ",".join(rule.verbs),
        rule.pattern,
        found["source"] + by,
    ]
