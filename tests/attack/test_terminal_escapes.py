"""Text of peers on a real terminal: no command lets it control the terminal.

Every command of the tree is in one of the two tables, so a new command must be classified.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import socketserver
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from polybus import freud, gsb, native, pirate
from polybus.cli import main
from polybus.testing.bus_process import serve
from tests.rig.observer import until

# A title and a bell, a cleared screen, C1 as a byte and as a character, DEL, a bidi override.
ATTACK = b"owned\x1b]0;title\x07\x1b[2J\x9b31m\x7f\xc2\x9b32m\xe2\x80\xae"
ATTACK_TEXT = ATTACK.decode("utf-8", "replace")
NAME = "owned\u202e\u2066name"  # names must not have C0 and C1, but may have marks
SERVICE = "owned"  # names of services are ASCII
MARKER = b"owned"
# Escape sequences that polybus itself prints: colours, a hidden cursor, a progress bar.
DRAWN = re.compile(rb"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K|\r")
UNSAFE = re.compile(
    rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]"
)
TIMEOUT_S = 60.0
# The bus itself puts no text of peers into connections, and none with C0 into alarms. These are
# the answers of a bus that is not to be trusted.
CONNECTION = dict.fromkeys(("peer", "identity", "dialect", "state"), ATTACK_TEXT) | dict.fromkeys(
    ("id", "subscriptions", "received_messages", "sent_messages", "outbox_bytes"), 1
)
ALARM = dict.fromkeys(("kind", "object", "text"), ATTACK_TEXT) | {"since": 0.0}
HOSTILE_ANSWERS = {
    "connections": {"connections": [CONNECTION | {ATTACK_TEXT: ATTACK_TEXT}], "next": None},
    "stats": {ATTACK_TEXT: {ATTACK_TEXT: ATTACK_TEXT}, "alarms": [ALARM]},
}


def rule(uid: int) -> tuple[str, ...]:
    return ("deny", f"user:{uid}", "produce", NAME)


class HostileBus:
    """A bus with hostile names and bodies in every dialect."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        dialects = ("native=grpc", "gsb=tcp", "pirate=tcp", "rqueue=tcp")
        listen = [f"{one}://127.0.0.1:0" for one in dialects] + ["freud=unix:{}/freud.sock"]
        folder = stack.enter_context(_short_folder())
        process = stack.enter_context(
            serve(listen=[one.format(folder) for one in listen], env={"TERM": "xterm"})
        )
        self.url: str = str(process.address("native")).replace("grpc://", "polybus://")
        self.gsb: str = str(process.address("gsb"))
        self.freud: str = str(process.address("freud").path)
        self.pirate: str = str(process.address("pirate"))
        self.data: str = str(process.data)
        self.folder: Path = folder
        self.env = process.env | {"POLYBUS_URL": self.url}
        self._client = client = stack.enter_context(native.Client(self.url))
        client.create_topic(NAME)
        with client.producer() as producer:
            producer.produce(NAME, [ATTACK] * 2, [ATTACK_TEXT] * 2).result()
        member = {"topic": NAME, "group": NAME, "consumer": NAME}
        client.act("group.join", **member, max_deliver=3, heartbeat_ms=60_000, dead_ms=3_600_000)
        self.freud_client = stack.enter_context(freud.blocking.connect(f"unix:{self.freud}"))
        self.freud_client.create_topic("freud" + NAME)
        # Of its own, because `publish_to_freud` waits for the first subscriber of the other.
        self.freud_client.create_topic("left" + NAME)
        self.freud_client.subscribe("left" + NAME).detach()
        service = stack.enter_context(gsb.blocking.connect(self.gsb))
        service.register(SERVICE, lambda call: ATTACK_TEXT)
        reader = pirate.blocking.connect(self.pirate, state=folder / "pirate")
        stack.enter_context(reader).subscribe(NAME)
        assert process.run("acl", "add", *rule(65534)).returncode == 0
        client.create_topic("unread" + NAME, shards=1)
        member = {"topic": "unread" + NAME, "group": NAME, "consumer": NAME}
        client.act("group.join", **member, heartbeat_ms=60_000, dead_ms=3_600_000)
        limits = {"retain_messages": 1, "retain_unread": "drop"}
        client.act("topic.configure", topic="unread" + NAME, change=limits)
        self.hostile_admin: str = stack.enter_context(serve_hostile_answers(folder))

    def raise_alarm(self) -> None:
        """Let retention trim messages that a group has not read; the alarm names both."""
        with self._client.producer() as producer:
            producer.produce("unread" + NAME, [b"x"] * 9).result()
        # It ends after a minute.
        until(lambda: self._client.stats()["alarms"], "messages are trimmed unread")


@contextlib.contextmanager
def serve_hostile_answers(folder: Path) -> Iterator[str]:
    """Serve an admin socket whose answers have control characters in every text."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            verb = json.loads(self.rfile.readline())["verb"]
            self.wfile.write(json.dumps({"ok": HOSTILE_ANSWERS[verb]}).encode() + b"\n")

    path = str(folder / "hostile.sock")
    with socketserver.ThreadingUnixStreamServer(path, Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield path
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def _short_folder() -> Iterator[Path]:
    """The path of a Unix socket has at most 107 bytes, so this is not in tmp_path."""
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def bus() -> Iterator[HostileBus]:
    with contextlib.ExitStack() as stack:
        yield HostileBus(stack)


def run_on_terminal(
    bus: HostileBus, args: list[str], while_running: Callable[[], None] = lambda: None
) -> bytes:
    """Run a command with a terminal as stdout and stderr. Returns all that it got."""
    controller, terminal = pty.openpty()
    modes = termios.tcgetattr(terminal)
    modes[1] &= ~termios.OPOST  # the terminal itself adds no carriage returns
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
    command = [sys.executable, "-m", "polybus", *args]
    with subprocess.Popen(
        command, env=bus.env, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        killer = threading.Timer(TIMEOUT_S, process.kill)
        killer.start()
        printed = b""
        try:
            while_running()
            while data := os.read(controller, 65536):
                printed += data
        except OSError:
            pass  # the command has closed its end
        killer.cancel()
    os.close(controller)
    return printed


def publish_to_freud(bus: HostileBus) -> None:
    while bus.freud_client.produce("freud" + NAME, ATTACK) is None:
        pass  # the command has not subscribed yet


def left_subscription(bus: HostileBus, body: bytes = ATTACK) -> str:
    """Return the id of a detached subscription that has a hostile message."""
    key = bus.freud_client.subscribe("left" + NAME).detach()
    assert bus.freud_client.produce("left" + NAME, body) is not None
    return key.hex()


Arguments = Callable[[HostileBus], list[str]]
# Commands that print names or bodies of peers, in each of their forms.
PRINTS_PEER_TEXT: dict[str, list[Arguments]] = {
    "sub": [
        lambda bus: ["sub", NAME, "-o", "earliest", "-e"],
        lambda bus: ["sub", NAME, "-o", "earliest", "-e", "--json"],
        lambda bus: ["sub", NAME, "-o", "earliest", "-e", "-f", "%k %s %t\\n"],
        lambda bus: ["sub", "owned" + ATTACK_TEXT],  # an error
    ],
    "fdq consume": [
        lambda bus: ["fdq", "consume", NAME, "--group", "one", "-e"],
        lambda bus: ["fdq", "consume", NAME, "--group", "two", "-e", "--json"],
    ],
    "fdq replay": [lambda bus: ["fdq", "replay", NAME]],
    "inspect": [
        lambda bus: ["inspect"],
        lambda bus: ["inspect", "--json"],
        lambda bus: ["inspect", "--store", bus.data],
    ],
    "topic ls": [lambda bus: ["topic", "ls"], lambda bus: ["topic", "ls", "--json"]],
    "topic info": [lambda bus: ["topic", "info", NAME]],
    "topic stats": [lambda bus: ["topic", "stats"], lambda bus: ["topic", "stats", NAME]],
    "group ls": [lambda bus: ["group", "ls"]],
    "group info": [lambda bus: ["group", "info", NAME, NAME]],
    "store info": [lambda bus: ["store", "info", bus.data]],
    "store verify": [lambda bus: ["store", "verify", bus.data + ATTACK_TEXT]],
    "freud topic ls": [lambda bus: ["freud", "topic", "ls", "--socket", bus.freud]],
    "freud subscribe": [
        lambda bus: ["freud", "subscribe", "freud" + NAME, "-n", "1", "--socket", bus.freud],
        lambda bus: [
            *("freud", "subscribe", "freud" + NAME, "-n", "1", "--json"),
            *("--socket", bus.freud),
        ],
    ],
    "freud subscription read": [
        lambda bus: [
            "freud",
            "subscription",
            "read",
            left_subscription(bus),
            "--socket",
            bus.freud,
        ],
        lambda bus: [
            *("freud", "subscription", "read", left_subscription(bus, ATTACK_TEXT.encode())),
            *("--json", "--socket", bus.freud),
        ],
    ],
    "freud subscription ls": [
        lambda bus: ["freud", "subscription", "ls"],
        lambda bus: ["freud", "subscription", "ls", "--json"],
    ],
    "gsb call": [lambda bus: ["gsb", "call", SERVICE, "--at", bus.gsb]],
    "gsb ls": [
        lambda bus: ["gsb", "ls", "--at", bus.gsb],
        lambda bus: ["gsb", "ls", "--json", "--at", bus.gsb],
    ],
    "pirate subs": [lambda bus: ["pirate", "subs"], lambda bus: ["pirate", "subs", "--json"]],
    "stats": [
        lambda bus: bus.raise_alarm() or ["stats"],
        lambda bus: bus.raise_alarm() or ["stats", "--json"],
        lambda bus: ["stats", "--admin", bus.hostile_admin],
        lambda bus: ["stats", "--json", "--admin", bus.hostile_admin],
    ],
    "connections": [
        lambda bus: ["connections", "--admin", bus.hostile_admin],
        lambda bus: ["connections", "--json", "--admin", bus.hostile_admin],
    ],
    "acl test": [lambda bus: ["acl", "test", "user:65534", "produce", NAME]],
    "acl add": [lambda bus: ["acl", "add", *rule(65533)]],
    "acl ls": [lambda bus: ["acl", "ls"], lambda bus: ["acl", "ls", "--json"]],
    "acl rm": [
        lambda bus: ["acl", "add", *rule(65532)],
        lambda bus: ["acl", "rm", *rule(65532)],
    ],
}
OWN_INPUT = "prints counts, and names that its user gave"
SPARK = "prints tables (text_table) and Spark's errors (stderr_filter); needs Spark"
SAME_FILTER = "prints through the same filter; its text is of this host or of the operator"
OTHERS: dict[str, str] = {
    **dict.fromkeys(("pub", "fdq produce", "topic create", "topic rm", "topic trim"), OWN_INPUT),
    **dict.fromkeys(("topic configure", "topic pause", "topic resume"), OWN_INPUT),
    **dict.fromkeys(("group pause", "group resume"), OWN_INPUT),
    # Names of groups may be of others; `group ls` shows the filter.
    "topic reshard": "prints through the same filter, which is tested with `group ls`",
    **dict.fromkeys(("freud topic create", "freud topic delete", "freud subcount"), OWN_INPUT),
    **dict.fromkeys(("freud subscription create", "freud subscription rm"), OWN_INPUT),
    **dict.fromkeys(("freud topic publish", "group rm", "group reset", "gsb ping"), OWN_INPUT),
    **dict.fromkeys(("gsb serve", "rqueue sink", "rqueue pusher", "pirate drop"), OWN_INPUT),
    **dict.fromkeys(("gsb id", "gsb nodes"), "prints node ids, which are hex digits, and numbers"),
    **dict.fromkeys(("gsb link add", "gsb link rm", "gsb link ls"), OWN_INPUT),
    # Ids that are not plain text are printed as hex.
    **dict.fromkeys(("pirate clients ls", "pirate clients rm"), SAME_FILTER),
    **dict.fromkeys(("store salvage", "store compact", "store backup"), SAME_FILTER),
    **dict.fromkeys(("store restore", "config check", "config show"), SAME_FILTER),
    **dict.fromkeys(("keys new", "keys ls", "keys allow"), SAME_FILTER),
    "keys revoke": SAME_FILTER,
    "pirate": "escapes bodies itself, also in a pipe: tests/unit/pirate",
    **dict.fromkeys(("serve", "rqueue"), "logs: tests/unit/server/test_logs.py"),
    **dict.fromkeys(
        [f"pipeline {one}" for one in ("archive", "dead-letters", "replay", "retain", "route")],
        SPARK,
    ),
    "pipeline stats": SPARK,
}


def list_commands() -> Iterator[str]:
    for name, (module, help_line) in main.all_commands().items():
        root = typer.Typer()
        root.callback()(lambda: None)
        import_module(module).register(root, name, help_line)
        yield from _leaves(typer.main.get_command(root).commands[name], name)  # type: ignore[attr-defined]


def _leaves(command: Any, path: str) -> Iterator[str]:
    nested = getattr(command, "commands", {})
    for name, one in nested.items():
        yield from _leaves(one, f"{path} {name}")
    if not nested or command.invoke_without_command:
        yield path


def test_every_command_is_classified():
    assert sorted([*PRINTS_PEER_TEXT, *OTHERS]) == sorted(list_commands())


# Tables escape their cells in any case, so other commands are safe without the filter.
NEEDS_FILTER = (
    "sub",
    "fdq consume",
    "fdq replay",
    "gsb call",
    "freud subscribe",
    "freud subscription read",
)
FILTER_OFF = pytest.mark.sabotage("terminal-filter-off", expects="controls the terminal")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, marks=FILTER_OFF if one in NEEDS_FILTER else ())
        for one in PRINTS_PEER_TEXT
    ],
)
def test_no_command_passes_control_characters_to_a_terminal(bus, command):
    for arguments in PRINTS_PEER_TEXT[command]:
        args = arguments(bus)
        is_waiting = args[:2] == ["freud", "subscribe"]
        act = (lambda: publish_to_freud(bus)) if is_waiting else (lambda: None)
        printed = run_on_terminal(bus, args, act)
        assert MARKER in printed, f"{args} printed no text of a peer: {printed!r}"
        left = UNSAFE.search(DRAWN.sub(b"", printed))
        assert left is None, f"{args} controls the terminal: {left}, {printed!r}"
        with contextlib.suppress(UnicodeDecodeError):
            printed.decode()
            continue
        pytest.fail(f"{args} controls the terminal: bytes that are not UTF-8, {printed!r}")


def test_watch_draws_the_screen_and_nothing_else(bus):
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "polybus", "topic", "stats", NAME, "--watch", "0.1"]
    with subprocess.Popen(
        command, env=bus.env, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        printed = b""
        while printed.count(MARKER) < 3:
            printed += os.read(controller, 65536)
        process.kill()
    os.close(controller)
    assert UNSAFE.search(DRAWN.sub(b"", printed.replace(b"\x1b[H\x1b[2J", b""))) is None, printed


def test_raw_and_pipes_get_the_bytes_unchanged(bus):
    args = ["sub", NAME, "-o", "earliest", "-e", "-n", "1"]
    assert run_on_terminal(bus, [*args, "--raw"]) == ATTACK + b"\n"
    command = [sys.executable, "-m", "polybus", *args]
    piped = subprocess.run(command, env=bus.env, capture_output=True, check=True)
    assert piped.stdout == ATTACK + b"\n"
