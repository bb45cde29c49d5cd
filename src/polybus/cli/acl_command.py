"""`polybus acl ls|add|rm|test`: the rules of the running bus.

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

DENIED = 4  # as for any refusal
TEST_HELP = f"Say whether WHO may do VERB (exit code 0, else {DENIED}), and which rule decides."

Words = Annotated[
    list[str],
    typer.Argument(metavar="EFFECT WHO VERBS PATTERN", help="The rule, also as one quoted word."),
]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    group.command("ls", help="List the rules in force.")(ls)
    group.command("add", help="Set a rule; it survives a restart.")(add)
    group.command("rm", help="Remove a rule that was added.")(rm)
    group.command("test", help=TEST_HELP)(explain)
    root.add_typer(group, name=name, help=help_line)


def ls(
    topic: Annotated[str | None, typer.Argument(help="Only rules that speak of it.")] = None,
    as_json: flags.Json = False,
    admin: flags.Admin = None,
) -> None:
    found = ask_admin("acl_ls", admin, **({"topic": topic} if topic else {}))
    if as_json:
        print(json.dumps(found, indent=2))
    elif found:
        print_table(("effect", "who", "verbs", "pattern", "written in"), map(_row, found))
    else:
        print("no rules")


def add(words: Words, admin: flags.Admin = None) -> None:
    told = ask_admin("acl_add", admin, rule=_rule(words))
    lasting = "" if told["kept"] else " (until this bus stops: it has no data folder)"
    print(f"{'added' if told['changed'] else 'already there'}: {told['rule']}{lasting}")


def rm(words: Words, admin: flags.Admin = None) -> None:
    print(f"removed: {ask_admin('acl_rm', admin, rule=_rule(words))['rule']}")


def explain(
    who: Annotated[str, typer.Argument(help="E.g. user:alice, anonymous, user:5,service:x.")],
    verb: Annotated[str, typer.Argument(help="create, produce, subscribe, delete, call, admin.")],
    topic: Annotated[str, typer.Argument(help="The name of a topic.")],
    as_json: flags.Json = False,
    admin: flags.Admin = None,
) -> int:
    found = ask_admin("acl_test", admin, who=who, action=verb, topic=topic)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{'allowed' if found['allowed'] else 'denied'}: {found['why']}")
    return 0 if found["allowed"] else DENIED


def _rule(words: list[str]) -> str:
    """Checked here, so that a mistake is told even when no bus runs."""
    if len(words) == 1:
        return str(Rule.parse(words[0]))
    if len(words) != 4:
        raise InvalidRule(f"a rule has four words: {WORDS}")
    return str(Rule.from_words(*words))


def _row(found: dict[str, Any]) -> list[str]:
    rule = Rule.parse(found["rule"])
    by = f" by uid {found['by']}" if found["by"] is not None else ""
    nobody = " (this host knows no such name)" if found["names_nobody"] else ""
    return [
        rule.effect,
        str(rule.who) + nobody,
        ",".join(rule.verbs),
        rule.pattern,
        found["source"] + by,
    ]
