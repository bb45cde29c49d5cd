"""The `polybus` command: import the module of the given command only, and report the outcome.

Importing every command for `polybus --help` would take seconds, because some of them need
Arrow or Spark. So `NOUNS` has the one-line help of every command, and only the module of
the given command is imported; the others are stubs that the help lists and that never run.
A new command is one line here and one module with `register(root, name, help_line)`.
Dialects register their own commands.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from polybus import __version__
from polybus.cli import exit_status, terminal

# command → (module, line in `polybus --help`)
NOUNS = {
    "serve": ("polybus.cli.serve_command", "Run the bus with its listeners."),
    "topic": ("polybus.cli.topic_command", "Create, configure, pause and trim durable topics."),
    "group": ("polybus.cli.group_command", "List, show, reset and remove consumer groups."),
    "pipeline": (
        "polybus.cli.pipeline_command",
        "Run Spark jobs: archive, retain, replay, stats, route.",
    ),
    "pub": ("polybus.cli.pub_command", "Publish lines of stdin, or arguments, to a durable topic."),
    "sub": ("polybus.cli.sub_command", "Print messages of a durable topic, from any position."),
    "stats": ("polybus.cli.stats_command", "Show the counters of the running bus."),
    "connections": ("polybus.cli.connections_command", "List the connections of the running bus."),
    "acl": ("polybus.cli.acl_command", "List, change and test the access rules."),
    "inspect": (
        "polybus.cli.inspect_command",
        "Print the store of a bus, or of a data folder, as a tree.",
    ),
    "store": ("polybus.cli.store_command", "Maintain a store: verify, back up, compact."),
    "config": ("polybus.cli.config_command", "Check or show the configuration."),
}

ABOUT = "One message bus, five dialects."
# Help without Rich: it loads in half the time and looks the same in a log or a pipe.
PLAIN = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}


def main() -> NoReturn:
    """Run the command line and exit (entry point of the console script)."""
    terminal.protect_terminal()
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command. Returns its exit code; a failure is reported on stderr in one line."""
    try:
        result = build(args)(list(args), prog_name="polybus", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException as error:
        return exit_status.report_error(error)
    return result if isinstance(result, int) else 0


def build(args: Sequence[str]) -> typer.Typer:
    """Return the command tree: the named command is real, the others are stubs."""
    root = typer.Typer(help=ABOUT, invoke_without_command=True, **PLAIN)  # type: ignore[arg-type]
    root.callback()(_root)
    typed = next((word for word in args if not word.startswith("-")), None)
    # A command of the table does not need the registry, which takes some 30 ms to read.
    commands = NOUNS if typed in NOUNS else all_commands()
    for name, (module, help_line) in commands.items():
        if name == typed:
            import_module(module).register(root, name, help_line)
        else:
            root.command(name, help=help_line)(_stub)
    return root


def all_commands() -> dict[str, tuple[str, str]]:
    """Return the commands of the table and of the installed dialects."""
    from polybus.bus.dialect_registry import installed_dialects

    dialects = {one.name: (one.module, one.help_line) for one in installed_dialects().commands}
    return {**dialects, **NOUNS}


def _stub() -> None:
    """Represent a command in the help; never runs."""


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"polybus {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> Any:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
