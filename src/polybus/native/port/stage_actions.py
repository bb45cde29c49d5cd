"""Actions on stages: batches that become visible together when they are published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.errors import MalformedRequest
from polybus.model.commit import Commit
from polybus.model.stamp import Stamp
from polybus.native.port import query_runs
from polybus.native.protocol.requests import StageDiscard, StageOpen, StagePublish, StageRenew

if TYPE_CHECKING:
    from polybus.native.port.actions import Handlers
    from polybus.native.port.native_port import Caller, NativePort
    from polybus.native.protocol.answers import Committed, Empty, StageOpened

MAX_LEASE_S = 7 * 86_400.0


def _open(port: NativePort, caller: Caller, request: StageOpen) -> StageOpened:
    lease_s = _check_lease(request.lease_s)
    return {"stage": port.stages.open(caller.identity, lease_s, port.store.open_stage)}


def _renew(port: NativePort, caller: Caller, request: StageRenew) -> Empty:
    lease_s = _check_lease(request.lease_s)
    port.store.renew(request.stage, lease_s)
    port.stages.renew(request.stage, lease_s)
    return {}


def _check_lease(lease_s: float) -> float:
    if lease_s > MAX_LEASE_S:
        raise MalformedRequest(f"lease_s must be at most {MAX_LEASE_S:.0f}, got {lease_s}")
    return float(lease_s)


def _publish(port: NativePort, caller: Caller, request: StagePublish) -> Committed:
    durable = port.access.durable
    port.access.check_staged(caller.identity, request.stages)
    if not request.run:
        stamp = Stamp.parse(request.stamp) if request.stamp else None
        if stamp is not None:
            port.owners.check(caller.identity, stamp.producer)
        commit = Commit(stages=tuple(request.stages), stamp=stamp)
        done = durable.publish(commit)
        if not done.duplicate:
            port.stages.end(request.stages)
        return port.describe_commit(done)
    epoch = query_runs.RunCommit.parse(request.stages, request.stamp, request.run)
    done = query_runs.publish(durable, port.owners, caller.identity, epoch)
    if done.duplicate:
        # The epoch was published before, so the stages of the replay are never needed.
        for stage in epoch.stages:
            port.store.discard(stage)
    port.stages.end(epoch.stages)
    return port.describe_commit(done)


def _discard(port: NativePort, caller: Caller, request: StageDiscard) -> Empty:
    port.store.discard(request.stage)
    port.stages.end([request.stage])
    return {}


ACTIONS: Handlers = {
    StageOpen: _open,
    StageRenew: _renew,
    StagePublish: _publish,
    StageDiscard: _discard,
}
