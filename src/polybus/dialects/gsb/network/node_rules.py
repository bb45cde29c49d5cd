"""The service `public/gsb/acl`, by which a node changes the rules for calls of nodes.

A call has `{"verb": "add" | "rm" | "ls", "rule": "allow node:0x… call public/greeter"}`. The rules
that it changes are those of `polybus acl`, and only such as name a node, the verb `call` and names
under `public/`. Rules about `public/gsb/` itself are not among them: a node that may change rules
cannot give that right to others. It acts, and is logged, as the node that it is, so it cannot
remove rules that an admin has set (server/acl_admin.py).

Only a rule with the pattern `public/gsb/acl` grants the service; `public/*` does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgpack

from polybus.bus.admin_verb import AdminError
from polybus.dialects.gsb.server.service_registry import PUBLIC, ServiceStatus
from polybus.dialects.gsb.service_address import PUBLIC_ACL, RESERVED_PUBLIC, StatusCode
from polybus.errors import InvalidRule
from polybus.model.access_rule import CALL, DENY, NODE, Rule

if TYPE_CHECKING:
    from polybus.bus.admin_verb import AdminVerb
    from polybus.bus.policy import Policy
    from polybus.dialects.gsb.server.call_router import CallRouter
    from polybus.dialects.gsb.server.call_table import CallingNode
    from polybus.dialects.gsb.server.session import GsbSession

VERBS = {"add": "acl_add", "rm": "acl_rm", "ls": "acl_ls"}
MAX_CHANGES = 16  # calls that wait for the disk at a time
ERRORS = {"denied": StatusCode.DENIED, "not_found": StatusCode.NOT_FOUND}


class NodeRules:
    def __init__(
        self, policy: Policy, rule_verbs: Mapping[str, AdminVerb], calls: CallRouter
    ) -> None:
        self._policy = policy
        self._verbs = rule_verbs
        self._calls = calls
        self._tasks: set[asyncio.Task[None]] = set()

    def call(
        self, session: GsbSession, request_id: bytes, origin: CallingNode, data: bytes
    ) -> ServiceStatus | None:
        """Begin to answer a call. Returns its refusal, or None if the answer follows."""
        verdict = self._policy.decide(origin.identity, CALL, PUBLIC_ACL.encode())
        if not verdict.allowed or verdict.by is None or verdict.by.rule.pattern != PUBLIC_ACL:
            return ServiceStatus(StatusCode.DENIED, f"not allowed to call {PUBLIC_ACL!r}")
        try:
            verb, rule = _read_request(data)
        except (InvalidRule, ValueError) as error:
            return ServiceStatus(StatusCode.BAD_REQUEST, str(error))
        if len(self._tasks) >= MAX_CHANGES:
            return ServiceStatus(StatusCode.UNAVAILABLE, "too many changes at a time")
        work = self._answer(session, request_id, origin, len(data), verb, rule)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    async def _answer(
        self,
        session: GsbSession,
        request_id: bytes,
        origin: CallingNode,
        size: int,
        verb: str,
        rule: Rule | None,
    ) -> None:
        def refuse(code: StatusCode, text: str) -> None:
            status = ServiceStatus(code, text, origin)
            self._calls.refuse(session, request_id, PUBLIC_ACL.encode(), size, status)

        request = {} if rule is None else {"rule": str(rule)}
        try:
            answer: Any = self._verbs[VERBS[verb]].answer(request, origin.identity)
            if asyncio.iscoroutine(answer):
                answer = await answer
        except AdminError as error:
            refuse(ERRORS.get(error.code, StatusCode.BAD_REQUEST), str(error))
            return
        except Exception as error:  # the call must end in any case
            refuse(StatusCode.FAILURE, f"the bus failed: {error}")
            raise
        if verb == "ls":
            rules = [Rule.parse(str(one["rule"])) for one in answer]
            answer = [str(one) for one in rules if _is_for_nodes(one)]
        reply = msgpack.packb(answer)
        self._calls.answer(session, request_id, PUBLIC_ACL, size, reply, origin)


def _read_request(data: bytes) -> tuple[str, Rule | None]:
    """Raises `InvalidRule`, or ValueError for data of another form."""
    try:
        request = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        request = None
    verb = request.get("verb") if isinstance(request, dict) else None
    if not isinstance(verb, str) or verb not in VERBS:
        raise ValueError(f"the data must be a map with a verb of {', '.join(VERBS)}")
    if verb == "ls":
        return verb, None
    rule = Rule.parse(str(request.get("rule", "")))
    if not _is_for_nodes(rule):
        raise ValueError(
            f"the rule must be for a node, call, and a name under {PUBLIC}"
            f" but not {RESERVED_PUBLIC}, got {str(rule)!r:.100}"
        )
    return verb, rule


def _is_for_nodes(rule: Rule) -> bool:
    is_own = rule.pattern.startswith(RESERVED_PUBLIC)
    # A deny rule with a star could lock other nodes out of this service.
    is_own = is_own or (rule.effect == DENY and not rule.is_exact)
    is_public = rule.pattern.startswith(PUBLIC) and not is_own
    return rule.who.kind == NODE and rule.verbs == (CALL,) and is_public
