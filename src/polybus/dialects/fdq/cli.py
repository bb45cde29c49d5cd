"""`polybus fdq`: producing, consuming and replaying from a terminal."""

from __future__ import annotations

import typer

from polybus.dialects.fdq import consume_command, produce_command, replay_command

EXIT_CODES = """\b
Exit codes:
  0   done
  2   a wrong argument, or a data folder that another process has
  3   no bus answers, or it went away
  4   the bus refused: no such topic, not allowed, taken over by another of the same name
  1   a defect of polybus, or whoever read the output has left
  130 Ctrl-C
"""


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    commands = (
        ("produce", produce_command.produce, "Produce lines of stdin, or arguments, by key."),
        ("consume", consume_command.consume, "Print a group's messages, and ack them."),
        ("replay", replay_command.replay, "Print a topic again, from any place to any other."),
    )
    for verb, command, line in commands:
        group.command(verb, help=line, epilog=EXIT_CODES)(command)
    root.add_typer(group, name=name, help=help_line, epilog=EXIT_CODES)
