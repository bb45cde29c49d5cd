"""`polybus freud`: topics, publishing and subscribing from a shell.

Results go to stdout, messages about them to stderr. If the bus refuses a request, the
exit code is 10 plus the Freud code, so that it differs from every other exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybus import errors
from polybus.cli.flags import Admin, Raw
from polybus.cli.terminal import print_raw
from polybus.dialects.freud.limits import FreudLimits
from polybus.model.limits import KIB

if TYPE_CHECKING:
    from polybus.dialects.freud.client.answer_batch import Record
    from polybus.dialects.freud.client.freud_blocking import BlockingClient, BlockingSubscription

OK = 0
NOTHING_HAPPENED = 11
# First match wins. None: cli/exit_status.py reports the error, as for any other command.
EXIT_CODE_BY_ERROR: tuple[tuple[type[errors.PolybusError], int | None], ...] = (
    (errors.Denied, 12),
    (errors.DoesNotExist, 13),
    (errors.MalformedRequest, 14),
    (errors.LimitReached, 15),
    (errors.BadFrame, None),
    (errors.PeerError, 15),
    (errors.PolybusError, None),
)
EXIT_CODES = """\b
Exit codes:
  0   Ok
  11  Nothing Happened: the topic has no subscriber, or no change was needed
  12  No: the policy does not allow it
  13  Doesn't Exist: no such topic or subscription, or it was deleted before COUNT
  14  Malformed Request
  15  Server Error: a quota is reached
  2   a wrong argument
  3   no bus answers, or it went away
  4   the socket is not for this user
  5   the peer does not speak Freud
  1   a defect of polybus, or stdout was closed
  130 Ctrl-C; 143 SIGTERM
"""

# Messages per request: enough to print fast, and cheap to request when none arrive.
BATCH = 64
STDIN = 0
READ_BYTES = 256 * KIB
MAX_BODY_BYTES = FreudLimits().max_frame_bytes
TERMINATED = 128 + signal.SIGTERM

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
Socket = Annotated[
    str | None,
    typer.Option(
        "--socket", metavar="PATH", help="Freud's socket. [default: that of this user's bus]"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SubscriberId = Annotated[
    str, typer.Argument(metavar="ID", help="Id of the subscription, as `create` prints it.")
]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    """Add the `freud` group to the `polybus` command."""
    freud, topic, subscription = typer.Typer(), typer.Typer(), typer.Typer()
    commands: tuple[tuple[typer.Typer, str, Callable[..., int], str], ...] = (
        (topic, "create", create, "Create a topic."),
        (topic, "delete", delete, "Delete a topic; its readers get a notice."),
        (topic, "ls", ls, "List the topics that you may use."),
        (topic, "publish", publish, "Publish a message, and print its id."),
        (freud, "subscribe", subscribe, "Print messages as they arrive."),
        (freud, "subcount", subcount, "Count the subscribers of a topic."),
        (subscription, "create", create_subscription, "Subscribe, print the id, and leave."),
        (subscription, "read", read_subscription, "Print the unread messages of a subscription."),
        (subscription, "ls", ls_subscriptions, "List your subscriptions; an admin sees all."),
        (subscription, "rm", rm_subscription, "End a subscription; its messages are dropped."),
    )
    for parent, command_name, command, command_help in commands:
        parent.command(command_name, help=command_help, epilog=EXIT_CODES)(command)
    freud.add_typer(topic, name="topic", help="Create, delete, list, publish.", epilog=EXIT_CODES)
    freud.add_typer(
        subscription,
        name="subscription",
        help="Subscriptions that outlive a command: create, read, list, remove.",
        epilog=EXIT_CODES,
    )
    root.add_typer(freud, name=name, help=help_line, epilog=EXIT_CODES)


# --- the commands ------------------------------------------------------------


def create(topic: Topic, socket: Socket = None) -> int:
    with _Bus(socket) as bus:
        if not bus.client.create_topic(topic):
            return bus.nothing_happened(f"topic {topic!r} already exists")
        print(f"created {_printable(topic)}")
    return bus.code


def delete(topic: Topic, socket: Socket = None) -> int:
    with _Bus(socket) as bus:
        if not bus.client.delete_topic(topic):
            return bus.nothing_happened(f"topic {topic!r} does not exist or is being deleted")
        print(f"deleted {_printable(topic)}")
    return bus.code


def ls(as_json: Json = False, socket: Socket = None) -> int:
    with _Bus(socket) as bus:
        names = bus.client.list_topics()
        for line in [json.dumps(names)] if as_json else map(_printable, names):
            print(line)
    return bus.code


def subcount(topic: Topic, socket: Socket = None) -> int:
    with _Bus(socket) as bus:
        print(bus.client.count_subscribers(topic))
    return bus.code


def publish(
    topic: Topic,
    message: Annotated[
        str | None, typer.Argument(metavar="MESSAGE", help="The message; - reads all of stdin.")
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Publish each line of stdin as a message.")
    ] = False,
    socket: Socket = None,
) -> int:
    if lines is (message is not None):
        raise errors.UsageError("either MESSAGE (- for stdin) or --lines must be given, not both")
    with _Bus(socket) as bus:
        if message is None:
            return _publish_lines(bus, topic)
        body = _read_stdin() if message == "-" else os.fsencode(message)
        message_id = bus.client.produce(topic, body)
        if message_id is None:
            return bus.nothing_happened(f"topic {topic!r} has no subscriber")
        print(message_id)
    return bus.code


def subscribe(
    topic: Topic,
    as_json: Json = False,
    count: Annotated[
        int,
        typer.Option(
            "-n", "--count", metavar="COUNT", min=0, help="Stop after this many messages; 0: never."
        ),
    ] = 0,
    raw: Raw = False,
    socket: Socket = None,
) -> int:
    print_raw(raw)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # unsubscribes on the way out
    with _Bus(socket) as bus, bus.client.subscribe(topic) as subscription:
        _print_notice(f"subscribed to {topic!r}")
        format_record = _as_json if as_json else _as_text
        printed = 0
        for records in _batches(subscription, count):
            _print_records(records, format_record)
            printed += len(records)
        if subscription.notice is not None and (printed < count or not count):
            return _print_deletion(subscription.notice, as_json, OK if not count else 13)
    return bus.code


def create_subscription(topic: Topic, as_json: Json = False, socket: Socket = None) -> int:
    with _Bus(socket) as bus:
        subscriber_id = bus.client.subscribe(topic).detach().hex()
        print(json.dumps({"id": subscriber_id, "topic": topic}) if as_json else subscriber_id)
    return bus.code


def read_subscription(
    subscriber_id: SubscriberId,
    as_json: Json = False,
    count: Annotated[
        int,
        typer.Option(
            "-n",
            "--count",
            metavar="COUNT",
            min=0,
            help="Stop after this many messages; 0: after all unread ones.",
        ),
    ] = 0,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", min=0, help="Wait this long for the first message."
        ),
    ] = 0,
    raw: Raw = False,
    socket: Socket = None,
) -> int:
    print_raw(raw)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # detaches on the way out
    key = _parse_id(subscriber_id)
    with _Bus(socket) as bus:
        subscription = bus.client.attach(key)
        format_record = _as_json if as_json else _as_text
        printed = 0
        try:
            while not count or printed < count:
                wanted = min(count - printed, BATCH) if count else BATCH
                records = subscription.get_many(wanted, 0 if printed else wait_s)
                if not records:
                    break
                _print_records(records, format_record)
                printed += len(records)
        except errors.TopicDeleted:
            assert subscription.notice is not None
            code = OK if printed >= count else 13
            return _print_deletion(subscription.notice, as_json, code)
        finally:
            subscription.detach()  # else the end of the client would unsubscribe
        if not printed:
            return bus.nothing_happened("the subscription has no unread message")
    return bus.code


def ls_subscriptions(as_json: Json = False, admin: Admin = None) -> int:
    from polybus.cli.admin_request import ask_admin
    from polybus.cli.text_table import print_fields

    rows: list[dict[str, Any]] = []
    skip: int | None = 0
    while skip is not None:
        page = ask_admin("freud_subscriptions", admin, skip=skip)
        rows += page["subscriptions"]
        skip = page["next"]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        columns = ("id", "topic", "user", "state", "unread_messages", "unread_bytes", "detached_s")
        short = {name.removesuffix("_s").replace("_", " "): name for name in columns}
        print_fields(columns, short, rows)
    return OK


def rm_subscription(subscriber_id: SubscriberId, admin: Admin = None) -> int:
    from polybus.cli.admin_request import ask_admin

    key = _parse_id(subscriber_id)
    try:
        row = ask_admin("freud_subscription_rm", admin, id=key.hex())
    except errors.Refused as error:
        _print_notice(str(error))
        return 13
    print(f"removed {key.hex()}, {row['unread_messages']} unread messages")
    return OK


# --- helpers -----------------------------------------------------------------


class _Bus:
    """Context manager of a client that turns a refusal into a line on stderr and an exit code."""

    client: BlockingClient

    def __init__(self, socket: str | None) -> None:
        self.code = OK
        self._socket = socket

    def __enter__(self) -> _Bus:
        from polybus.dialects.freud.client import freud_blocking

        path = None if self._socket is None else self._socket.removeprefix("unix:")
        self.client = freud_blocking.connect(None if path is None else f"unix:{path}")
        self.client.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        self.client.close()
        if not isinstance(error, errors.PolybusError):
            return False
        code = next(code for kind, code in EXIT_CODE_BY_ERROR if isinstance(error, kind))
        if code is None:
            return False
        self.code = code
        _print_notice(str(error))
        return True

    def nothing_happened(self, reason: str) -> int:
        _print_notice(f"nothing happened: {reason}")
        return NOTHING_HAPPENED


def _batches(subscription: BlockingSubscription, count: int) -> Iterator[list[Record]]:
    """Yield batches until `count` messages arrived (0: until the topic is deleted)."""
    left = count or sys.maxsize
    while left:
        try:
            records = subscription.get_many(min(left, BATCH))
        except errors.TopicDeleted:
            return
        left -= len(records)
        yield records


def _publish_lines(bus: _Bus, topic: str) -> int:
    published = unread = 0
    try:
        for bodies in _lines():
            ids = bus.client.produce_many(topic, bodies)
            unread += ids.count(None)
            published += len(ids) - ids.count(None)
    except errors.PolybusError:
        print(f"published at least {published}", flush=True)
        raise
    print(f"published {published}")
    if unread:
        return bus.nothing_happened(f"{unread} more messages to {topic!r} had no subscriber")
    return OK


def _parse_id(text: str) -> bytes:
    from polybus.dialects.freud.codec import SUBSCRIBER_ID_BYTES

    try:
        subscriber_id = bytes.fromhex(text)
    except ValueError:
        subscriber_id = b""
    if len(subscriber_id) != SUBSCRIBER_ID_BYTES:
        digits = 2 * SUBSCRIBER_ID_BYTES
        raise errors.UsageError(f"ID must be {digits} hex digits, got {text[:64]!r}")
    return subscriber_id


def _print_records(records: list[Record], format_record: Callable[[Record], bytes]) -> None:
    sys.stdout.buffer.write(b"".join(map(format_record, records)))
    sys.stdout.buffer.flush()


def _print_deletion(notice: Record, as_json: bool, code: int) -> int:
    """Print the deletion notice of a topic. Returns the exit code."""
    from polybus.dialects.freud.codec import NOTICE_PREFIX

    topic = notice.body.removeprefix(NOTICE_PREFIX).decode("utf-8", "backslashreplace")
    if as_json:
        line = {"id": notice.message_id, "timestamp_ns": notice.timestamp_ns}
        print(json.dumps({**line, "deleted": topic}), flush=True)
    _print_notice(f"topic {topic!r} was deleted")
    return code


def _lines() -> Iterator[list[bytes]]:
    """Yield the lines of stdin in groups as they arrive; the last may lack its newline."""
    rest = b""
    for data in _stdin():
        *whole, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_BODY_BYTES:
            whole.append(rest)  # the bus will refuse it, so do not read the rest
        if whole:
            yield whole
    if rest:
        yield [rest]


def _read_stdin() -> bytes:
    """Return all of stdin, cut soon after the largest body that the bus accepts."""
    content = bytearray()
    for data in _stdin():
        content += data
        if len(content) > MAX_BODY_BYTES:
            break
    return bytes(content)


def _stdin() -> Iterator[bytes]:
    while data := os.read(STDIN, READ_BYTES):
        yield data


def _as_json(record: Record) -> bytes:
    import base64

    shown = {"id": record.message_id, "timestamp_ns": record.timestamp_ns}
    try:
        body = {"body": record.body.decode("utf-8")}
    except UnicodeDecodeError:
        body = {"body_base64": base64.b64encode(record.body).decode()}
    return json.dumps({**shown, **body}).encode() + b"\n"


def _as_text(record: Record) -> bytes:
    return record.body + b"\n"


def _printable(text: str) -> str:
    plain = (char if char.isprintable() or char == "\t" else repr(char)[1:-1] for char in text)
    return "".join(plain)


def _print_notice(text: str) -> None:
    with contextlib.suppress(OSError):
        print("polybus:", " ".join(text.split()), file=sys.stderr, flush=True)
