"""The rules of ephemeral topics, in the plainest way.

Written from the spec alone. A name has *lives*: marked ones, whose subscribers have not
read their end yet, and at most one that is not marked, the last. A subscription is a list
of messages. Nothing is shared, batched or fast, and the use of a quota is computed again
for every request.

    bus = FreudBus(allows, limit, timeout_s=30, detached_s=60, max_unread=100, clock, wall_ns)
    bus.create(alice, b"news")
    reader = bus.subscribe(alice, b"news").found

`Reply` is the result of a request. The module freud_dialogue sends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

OK, NOTHING_HAPPENED, NO, DOESNT_EXIST, MALFORMED, SERVER_ERROR = range(6)
NOTICE = b"\0FREUD\0DELETED\0"
BYTES, SUBSCRIPTIONS, TOPICS = "quota_bytes", "quota_subscriptions", "quota_topics"
UNREAD = "max_unread_messages"


class Caller(NamedTuple):
    uid: int
    service: str


class Reply(NamedTuple):
    code: int
    payload: bytes = b""
    found: Subscription | None = None  # a new one: its id is the server's to choose


@dataclass(eq=False)
class Message:
    id: int
    time_ns: int
    body: bytes
    notice: bool = False

    @property
    def weight(self) -> int:
        return 0 if self.notice else len(self.body)


class Waiter(Protocol):
    """A waiting Get. `served` is called once, when there is a message or the end."""

    def served(self) -> None: ...


@dataclass(eq=False)
class Subscription:
    life: Life
    caller: Caller
    unread: list[Message] = field(default_factory=list)
    lent: list[Message] = field(default_factory=list)  # being sent: not yet consumed
    waiting: list[Waiter] = field(default_factory=list)
    used_s: float = 0.0  # when last; of interest while it is detached
    gone: bool = False

    def holds(self) -> list[Message]:
        return [one for one in self.unread + self.lent if not one.notice]


@dataclass(eq=False)
class Life:
    name: bytes
    creator: Caller
    subscribers: list[Subscription] = field(default_factory=list)
    next_id: int = 0
    last_ns: int = 0
    buffer: list[tuple[Message, bool]] = field(default_factory=list)  # and: was it pushed?
    marked: bool = False
    deadline_s: float | None = None


@dataclass(eq=False)
class PushReader:
    """A subscriber of a push dialect, and all that it has got."""

    topics: set[bytes] = field(default_factory=set)
    got: list[tuple[bytes, bytes]] = field(default_factory=list)


class FreudBus:
    def __init__(
        self,
        allows: Callable[[Caller, str, bytes, Caller | None], bool],
        limit: Callable[[int, str], int],
        timeout_s: float,
        detached_s: float,
        max_unread: int,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
    ) -> None:
        self.allows = allows
        self.limit = limit
        self.timeout_s = timeout_s
        self.detached_s = detached_s
        self.max_unread = max_unread
        self.clock = clock
        self.wall_ns = wall_ns
        self.lives: dict[bytes, list[Life]] = {}
        self.push_readers: list[PushReader] = []
        self.detached: list[Subscription] = []  # their connections have closed; oldest first
        self.evicted = 0
        self.timed: list[Life] = []  # those with a deadline, in the order they got it
        self.dropped: Counter[str] = Counter()
        self.received = 0  # accepted messages, also those without a reader

    # --- looking

    def state(self, name: bytes) -> str:
        lives = self.lives.get(name, [])
        current = self.current(name)
        if any(life.marked for life in lives):
            return "recreating" if current else "deleting"
        if current is None:
            return "gone"
        return "awaiting" if current.buffer else "live"

    def current(self, name: bytes) -> Life | None:
        lives = self.lives.get(name, [])
        return lives[-1] if lives and not lives[-1].marked else None

    def subscriptions(self) -> list[Subscription]:
        return [one for life in self.all_lives() for one in life.subscribers]

    def all_lives(self) -> list[Life]:
        return [life for lives in self.lives.values() for life in lives]

    def used(self, uid: int, quota: str) -> int:
        """Compute the use of a quota from the current state, so that no error can accumulate."""
        own_lives = [life for life in self.all_lives() if life.creator.uid == uid]
        own = [one for one in self.subscriptions() if one.caller.uid == uid]
        if quota == TOPICS:
            return len(own_lives)
        if quota == SUBSCRIPTIONS:
            return len(own)
        buffered = sum(one.weight for life in own_lives for one, _ in life.buffer)
        return buffered + sum(message.weight for one in own for message in one.holds())

    def pushed_to(self, name: bytes) -> list[PushReader]:
        return [one for one in self.push_readers if name in one.topics]

    # --- the requests

    def create(self, caller: Caller, name: bytes) -> Reply:
        if self.state(name) not in ("gone", "deleting"):
            return Reply(NOTHING_HAPPENED)
        if not self.allows(caller, "create", name, None):
            return Reply(NO)
        if self.is_over(caller, TOPICS, 1):
            return Reply(SERVER_ERROR, TOPICS.encode())
        self.lives.setdefault(name, []).append(Life(name, caller))
        return Reply(OK)

    def delete(self, caller: Caller, name: bytes) -> Reply:
        life = self.current(name)
        if life is None:
            return Reply(NOTHING_HAPPENED)
        if not self.allows(caller, "delete", name, life.creator):
            return Reply(NO)
        self.dropped["topic_deleted"] += len(life.buffer)
        life.buffer = []
        life.marked = True
        self.set_deadline(life, self.clock() + self.timeout_s)
        notice = self.new_message(life, NOTICE + name, notice=True)
        self.put(life.subscribers, notice)
        self.end_if_read(life)
        return Reply(OK)

    def subscribe(self, caller: Caller, name: bytes) -> Reply:
        life = self.current(name)
        if life is None:
            return Reply(DOESNT_EXIST)
        if not self.allows(caller, "subscribe", name, life.creator):
            return Reply(NO)
        while self.is_over(caller, SUBSCRIPTIONS, 1):
            if not self.evict_oldest(caller):
                return Reply(SERVER_ERROR, SUBSCRIPTIONS.encode())
        found = Subscription(life, caller)
        life.subscribers.append(found)
        self.heard(name)
        return Reply(OK, found=found)

    def produce(self, caller: Caller, name: bytes, body: bytes) -> Reply:
        life = self.current(name)
        if life is None:
            return Reply(DOESNT_EXIST)
        if not self.allows(caller, "produce", name, life.creator):
            return Reply(NO)
        if self.is_buffering(name):
            self.make_buffer_room(life, len(body))
        if self.is_buffering(name):  # the eviction may have ended the last old reader
            return self.hold_back(life, body)
        pushed = self.pushed_to(name)
        attached = [one for one in life.subscribers if one not in self.evictable()]
        reached = self.reached_by_all(attached, len(body))
        if reached:
            return Reply(SERVER_ERROR, reached.encode())
        self.make_room_for_all(life, len(body))
        if not life.subscribers and not pushed:
            self.received += 1
            self.dropped["no_subscriber"] += 1
            return Reply(NOTHING_HAPPENED)
        self.received += 1
        for reader in pushed:
            reader.got.append((name, body))
        message = self.new_message(life, body)
        self.put(life.subscribers, message)
        return Reply(OK, message.id.to_bytes(8, "little"))

    def hold_back(self, life: Life, body: bytes) -> Reply:
        """Buffered bytes are charged to the creator until there is a reader."""
        reached = self.buffer_reached(life, len(body))
        if reached:
            return Reply(SERVER_ERROR, reached.encode())
        self.received += 1
        message = self.new_message(life, body)
        life.buffer.append((message, False))
        return Reply(OK, message.id.to_bytes(8, "little"))

    def count(self, caller: Caller, name: bytes) -> Reply:
        lives = self.lives.get(name, [])
        if not lives:
            return Reply(DOESNT_EXIST)
        if not self.sees(caller, name):
            return Reply(NO)
        counted = [self.current(name)] if self.current(name) else lives
        readers = sum(len(life.subscribers) for life in counted if life)
        return Reply(OK, (readers + len(self.pushed_to(name))).to_bytes(4, "little"))

    def names(self, caller: Caller) -> Reply:
        seen = sorted(name for name in self.lives if self.sees(caller, name))
        listed = b"".join(len(name).to_bytes(4, "little") + name for name in seen)
        return Reply(OK, len(seen).to_bytes(4, "little") + listed)

    # --- a push dialect on the same names

    def push_subscribe(self, reader: PushReader, name: bytes) -> None:
        reader.topics.add(name)
        self.heard(name)

    def publish(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """Publish one buffer: first in its order to push readers, then by topic to all others."""
        batches: dict[bytes, list[bytes]] = {}
        for name, body in messages:
            batches.setdefault(name, []).append(body)
            for reader in self.pushed_to(name):
                reader.got.append((name, body))
        self.received += len(messages)
        collected = []
        for name, bodies in batches.items():
            pushed = self.pushed_to(name)
            life = self.current(name)
            if not pushed and not (life and (life.subscribers or self.is_buffering(name))):
                self.dropped["no_subscriber"] += len(bodies)
            elif life is not None:
                collected.append((life, bodies))
        for life, bodies in collected:
            self.accept_pushed(life, bodies)

    def accept_pushed(self, life: Life, bodies: list[bytes]) -> None:
        """A reader without room loses the messages."""
        if self.is_buffering(life.name):
            self.make_buffer_room(life, sum(map(len, bodies)))
        if self.is_buffering(life.name):
            self.buffer_where_room(life, [self.new_message(life, body) for body in bodies])
        elif life.subscribers:
            self.put_where_room(life, [self.new_message(life, body) for body in bodies])
        else:
            life.next_id += len(bodies)
            if not self.pushed_to(life.name):  # evicted since the fan-out looked
                self.dropped["no_subscriber"] += len(bodies)

    def buffer_where_room(self, life: Life, messages: list[Message]) -> None:
        for message in messages:
            if reached := self.buffer_reached(life, message.weight):
                self.dropped[reached] += 1
            else:
                life.buffer.append((message, True))

    # --- reading

    def consumed(self, subscription: Subscription, message: Message) -> None:
        """Remove a message whose whole answer is in the socket."""
        if subscription.gone:
            return
        subscription.lent.remove(message)
        if message.notice:
            self.end(subscription, "deleted")

    def given_back(self, lent: list[tuple[Subscription, Message]]) -> None:
        """Make messages unread again, each in its place, because they never reached the socket."""
        for subscription, message in lent:
            if subscription.gone:
                self.dropped["disconnected"] += not message.notice
                continue
            subscription.lent.remove(message)
            subscription.unread.append(message)
            subscription.unread.sort(key=lambda one: one.id)
        for subscription in dict(lent):
            self.serve(subscription)

    def end(self, subscription: Subscription, reason: str) -> None:
        unread = [one for one in subscription.unread if not one.notice]
        self.dropped[reason] += len(unread)
        subscription.unread = []
        subscription.gone = True
        subscription.life.subscribers.remove(subscription)
        if subscription in self.detached:
            self.detached.remove(subscription)
        self.end_if_read(subscription.life)
        self.serve(subscription)

    def serve(self, subscription: Subscription) -> None:
        """Answer waiting Gets in their order, while there are messages or a notice."""
        while subscription.waiting and (subscription.unread or subscription.gone):
            subscription.waiting.pop(0).served()

    # --- time

    def tick(self) -> None:
        now = self.clock()
        for one in [one for one in self.detached if now - one.used_s >= self.detached_s]:
            if one.waiting:
                self.detach(one)
            elif not one.gone:
                self.end(one, "abandoned")
        for life in [life for life in self.timed if life.deadline_s and life.deadline_s <= now]:
            self.set_deadline(life, None)
            if life.marked:
                for one in list(life.subscribers):
                    self.end(one, "deletion_timeout")
            else:
                self.dropped["no_subscriber"] += len(life.buffer)
                life.buffer = []

    # --- detached subscriptions

    def detach(self, one: Subscription) -> None:
        """Its connection has closed, or it was used by another just now."""
        self.detached = [other for other in self.detached if other is not one] + [one]
        one.used_s = self.clock()

    def evictable(self, caller: Caller | None = None) -> list[Subscription]:
        return [
            one
            for one in self.detached
            if not one.waiting and (caller is None or one.caller.uid == caller.uid)
        ]

    def evict_oldest(self, caller: Caller) -> bool:
        oldest = self.evictable(caller)[:1]
        for one in oldest:
            self.evicted += 1
            self.end(one, "evicted")
        return bool(oldest)

    def make_room(self, caller: Caller, size: int) -> None:
        while self.is_over(caller, BYTES, size) and self.evict_oldest(caller):
            pass

    def is_buffering(self, name: bytes) -> bool:
        return self.state(name) in ("recreating", "awaiting")

    def make_buffer_room(self, life: Life, size: int) -> None:
        fits = not self.is_over(life.creator, BYTES, size, without_detached=True)
        if fits and len(life.buffer) < self.max_unread:
            self.make_room(life.creator, size)

    def make_room_for_all(self, life: Life, size: int) -> None:
        """After this, nothing but attached subscriptions can be in the way of a message."""
        for one in list(life.subscribers):
            if one in self.evictable() and len(one.holds()) >= self.max_unread:
                self.evicted += 1
                self.end(one, "evicted")
        for caller in dict.fromkeys(one.caller for one in life.subscribers):

            def own() -> int:
                uids = [one.caller.uid for one in life.subscribers]
                return uids.count(caller.uid)  # noqa: B023

            while own() and self.is_over(caller, BYTES, own() * size):
                if not self.evict_oldest(caller):
                    break

    # --- inside

    def sees(self, caller: Caller, name: bytes) -> bool:
        creator = self.lives[name][-1].creator
        verbs = ("produce", "subscribe", "delete")
        allowed = [self.allows(caller, verb, name, creator) for verb in verbs]
        return caller == creator or any(allowed)

    def is_over(
        self, caller: Caller, quota: str, amount: int, *, without_detached: bool = False
    ) -> bool:
        used = self.used(caller.uid, quota)
        if without_detached:
            used -= sum(one.weight for own in self.evictable(caller) for one in own.holds())
        return used + amount > self.limit(caller.uid, quota)

    def reached(self, one: Subscription, size: int) -> str:
        """Return the limit that refuses one more message, or an empty string."""
        if len(one.holds()) >= self.max_unread:
            return UNREAD
        return BYTES if self.is_over(one.caller, BYTES, size) else ""

    def reached_by_all(self, attached: list[Subscription], size: int) -> str:
        """The same for all of them at once: those of one user share its bytes."""
        so_far: Counter[int] = Counter()
        for one in attached:
            so_far[one.caller.uid] += size
            if len(one.holds()) >= self.max_unread:
                return UNREAD
            if self.is_over(one.caller, BYTES, so_far[one.caller.uid], without_detached=True):
                return BYTES
        return ""

    def buffer_reached(self, life: Life, size: int) -> str:
        if len(life.buffer) >= self.max_unread:
            return UNREAD
        return BYTES if self.is_over(life.creator, BYTES, size) else ""

    def new_message(self, life: Life, body: bytes, *, notice: bool = False) -> Message:
        """Return a new message. The clock is read only if a reader can see the time."""
        if life.subscribers or self.state(life.name) != "live":
            life.last_ns = max(life.last_ns, self.wall_ns())
        life.next_id += 1
        return Message(life.next_id - 1, life.last_ns, body, notice)

    def put(self, readers: list[Subscription], message: Message) -> None:
        those = list(readers)
        for one in those:
            one.unread.append(message)
        for one in those:
            self.serve(one)

    def put_where_room(self, life: Life, messages: list[Message]) -> None:
        those = list(life.subscribers)
        for one in those:
            if not one.gone:
                self.make_room(one.caller, sum(message.weight for message in messages))
            for message in [] if one.gone else messages:
                if reached := self.reached(one, message.weight):
                    self.dropped[reached] += 1
                else:
                    one.unread.append(message)
        for one in those:
            self.serve(one)

    def heard(self, name: bytes) -> None:
        """Handle a new reader: a buffer that waited for one is delivered."""
        if self.state(name) == "awaiting":
            self.go_live(self.lives[name][-1])

    def end_if_read(self, life: Life) -> None:
        lives = self.lives.get(life.name, [])
        if not life.marked or life.subscribers or life not in lives:
            return
        lives.remove(life)
        self.set_deadline(life, None)
        if not lives:
            del self.lives[life.name]
        elif not lives[0].marked:
            self.make_way(lives[0])

    def make_way(self, life: Life) -> None:
        if life.subscribers or self.pushed_to(life.name):
            self.go_live(life)
        elif life.buffer:
            self.set_deadline(life, self.clock() + self.timeout_s)

    def set_deadline(self, life: Life, deadline_s: float | None) -> None:
        life.deadline_s = deadline_s
        self.timed = [one for one in self.timed if one is not life]
        if deadline_s is not None:
            self.timed.append(life)

    def go_live(self, life: Life) -> None:
        self.set_deadline(life, None)
        buffer, life.buffer = life.buffer, []
        late = [(life.name, message.body) for message, pushed in buffer if not pushed]
        for reader in self.pushed_to(life.name):
            reader.got += late
        self.put_where_room(life, [message for message, _ in buffer])
