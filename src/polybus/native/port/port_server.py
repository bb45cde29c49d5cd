"""The native port in a running bus: its listeners, and its use of the bus's loop."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from polybus.bus.admin_verb import AdminError
from polybus.durable.durable_bus import durable_bus
from polybus.errors import ConfigError, PolybusError, Unavailable, error_from_code
from polybus.model.access_rule import ADMIN
from polybus.native.port.native_port import NativePort
from polybus.native.port.port_shares import PortShares
from polybus.native.port.topic_access import TopicAccess
from polybus.transports.flight.authentication import TokenFile
from polybus.transports.flight.flight_listener import (
    FlightListener,
    SecurityOptions,
    SlowConsumerLimits,
)

if TYPE_CHECKING:
    from polybus.bus.admin_verb import AdminVerb
    from polybus.bus.dialect import ServerContext
    from polybus.model.address import Address
    from polybus.model.identity import Identity

# Codes of the admin socket that have another name in the tree of errors.
CODES = {"not_found": "does_not_exist", "bad_request": "malformed_request"}
# A loop that does not run a request within this time is stuck, or has ended.
ANSWER_TIMEOUT_S = 30.0


class PortServer:
    """One set of verbs for all addresses of the port."""

    def __init__(self, context: ServerContext) -> None:
        durable = durable_bus(context.broker)
        assert durable is not None
        assert context.run_on_loop is not None
        self._context = context
        policy = context.broker.policy
        access = TopicAccess(durable.topics, durable.names, policy, context.run_on_loop)
        rules = RuleRequests(context.rule_verbs, asyncio.get_running_loop())
        shares = PortShares.open(
            context.broker.shares, context.section, self._is_admin, self._count_refused
        )
        self._port = NativePort(
            access,
            context.section,
            time.monotonic,
            context.stats,
            rules,
            time.time_ns,
            context.broker.alarms,
            shares,
        )
        limit = context.section.max_connections
        self._listen_options = context.own_places("native", limit)
        self._reloads: list[Callable[[], Awaitable[None]]] = []

    async def listen(self, address: Address) -> FlightListener:
        context, limits = self._context, self._context.broker.limits
        section, tls = context.section, context.tls
        tokens = await asyncio.to_thread(TokenFile, section.tokens, time.time)
        listener = FlightListener(
            self._port,
            section,
            SecurityOptions(
                tokens,
                section.require_token,
                tls.certificate,
                tls.key,
                section.client_authorities,
            ),
            SlowConsumerLimits(
                limits.slow_consumer_timeout_s, limits.slow_consumer_min_bytes_per_s
            ),
            time.monotonic,
            lambda: time.time_ns() // 1_000_000,
            context.log,
            lambda error: self._call_on_loop(lambda: self._on_error(error)),
            lambda reason: self._call_on_loop(lambda: self._count("closed", reason)),
            lambda: self._call_on_loop(lambda: self._count("in_doubt", "native")),
            lambda reason, calls: self._call_on_loop(
                lambda: self._count("refused", f"native_{reason}", calls)
            ),
        )
        await listener.open(address, self._listen_options)
        self._reloads += [partial(asyncio.to_thread, tokens.reload), listener.reload]
        return listener

    async def reload(self) -> None:
        """Read tokens and certificates again. Raises `ConfigError` with every invalid file."""
        errors: list[str] = []
        for reload in self._reloads:
            try:
                await reload()
            except ConfigError as error:
                errors.append(str(error))
        if errors:
            raise ConfigError("; ".join(errors))

    def stop(self) -> None:
        self._port.close()

    async def close(self) -> None:
        self._port.close()
        await asyncio.to_thread(self._port.groups.stop)

    def _call_on_loop(self, step: Callable[[], None]) -> None:
        assert self._context.call_on_loop is not None
        self._context.call_on_loop(step)

    def _is_admin(self, identity: Identity) -> bool:
        """Return True for an admin of the bus. For the threads of the port."""
        policy, run_on_loop = self._context.broker.policy, self._context.run_on_loop
        if policy.is_born_admin(identity):
            return True
        assert run_on_loop is not None
        return policy.has_rules_for(ADMIN) and run_on_loop(policy.is_admin, identity)

    def _count_refused(self, reason: str) -> None:
        counters = self._context.broker.counters
        self._call_on_loop(lambda: counters.count("refused", f"native_{reason}"))

    def _count(self, family: str, reason: str, number: int = 1) -> None:
        self._context.broker.counters.count(family, reason, number)

    def _on_error(self, error: Exception) -> None:
        """Count an error that a client got. An error outside the tree is a fault of the bus."""
        if isinstance(error, PolybusError):
            self._context.broker.counters.count("refused", f"native_{error.code}")
        else:
            self._context.on_fault(error)


class RuleRequests:
    """The admin verbs on access rules, called from other threads, with errors of the tree."""

    def __init__(self, verbs: Mapping[str, AdminVerb], loop: asyncio.AbstractEventLoop) -> None:
        self._verbs = verbs
        self._loop = loop

    def __call__(self, verb: str, request: Mapping[str, object], caller: Identity) -> Any:
        response = self._ask(verb, dict(request), caller)
        try:
            return asyncio.run_coroutine_threadsafe(response, self._loop).result(ANSWER_TIMEOUT_S)
        except AdminError as error:
            raise error_from_code(CODES.get(error.code, error.code), str(error)) from None
        except (TimeoutError, RuntimeError):
            response.close()
            raise Unavailable("timed out waiting for the event loop; retry") from None

    async def _ask(self, verb: str, request: dict[str, Any], caller: Identity) -> Any:
        answer = self._verbs[verb].answer(request, caller)
        return await answer if inspect.isawaitable(answer) else answer
