"""Actions on access rules. The admin service decides who may change them, as for `polybus acl`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.native.protocol.answers import RuleChanged, RuleList, RuleVerdict
from polybus.native.protocol.requests import RuleAdd, RuleRemove, RulesGet, RuleTest

if TYPE_CHECKING:
    from polybus.native.port.actions import Handlers
    from polybus.native.port.native_port import Caller, NativePort


def _list(port: NativePort, caller: Caller, request: RulesGet) -> RuleList:
    return {"rules": port.rules("acl_ls", request.encode(), caller.identity)}


def _add(port: NativePort, caller: Caller, request: RuleAdd) -> RuleChanged:
    changed: RuleChanged = port.rules("acl_add", request.encode(), caller.identity)
    return changed


def _remove(port: NativePort, caller: Caller, request: RuleRemove) -> RuleChanged:
    changed: RuleChanged = port.rules("acl_rm", request.encode(), caller.identity)
    return changed


def _test(port: NativePort, caller: Caller, request: RuleTest) -> RuleVerdict:
    verdict: RuleVerdict = port.rules("acl_test", request.encode(), caller.identity)
    return verdict


ACTIONS: Handlers = {RulesGet: _list, RuleAdd: _add, RuleRemove: _remove, RuleTest: _test}
