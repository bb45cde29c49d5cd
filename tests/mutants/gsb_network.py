"""Mutants of the network of buses. Their tests must fail for each.

    python tests/mutants/gsb_network.py [--unit | --channels | --live] [part of a mutant's name ...]

The procedure is that of bus.py. `unit` has the parts without I/O. The others are real
buses; in `channels` and most of `live` the tests play the other nodes.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants import bus  # noqa: E402
from tests.mutants.bus import mutants  # noqa: E402
from tests.rig.patching import Edit, Patch  # noqa: E402

SUITES: dict[str, tuple[str, ...]] = {
    "unit": ("tests/unit/gsb/network",),
    "channels": ("tests/faults/test_gsb_channels.py", "tests/interop/test_gsb_node_accounts.py"),
    "live": ("tests/faults/test_gsb_links.py", "tests/interop/test_gsb_network.py"),
}

TOPOLOGY = mutants(
    "dialects/gsb/network/topology.py",
    (
        "a neighbour need not announce its link",
        "            if self._has_edge(node, self._node_id):\n",
        "            if node in self._announced:\n",
    ),
    (
        "one end announces a link of others",
        "if is_new and self._has_edge(next_node, node):",
        "if is_new and next_node in self._announced:",
    ),
    (
        "paths have nine links",
        "            if hops == MAX_HOPS:\n",
        "            if hops > MAX_HOPS:\n",
    ),
    (
        "older announcements replace newer ones",
        "announcement.sequence <= kept.sequence:",
        "announcement.sequence == kept.sequence:",
    ),
    (
        "the table of nodes is not bounded",
        "        if kept is None and len(self._announced) >= self._max_nodes and not",
        "        if False and not",
    ),
    (
        "any node displaces reachable ones",
        "        if lost is None and is_neighbour:\n",
        "        if lost is None:\n",
    ),
    (
        "a neighbour finds no place",
        "        if lost is None and is_neighbour:\n",
        "        if False:\n",
    ),
    (
        "nodes without a path keep their places",
        "next((one for one in self._announced if one not in paths), None)",
        "None",
    ),
    (
        "the nearest node makes room",
        "max(paths, key=lambda one: paths[one].hops)",
        "min(paths, key=lambda one: paths[one].hops)",
    ),
    ("silent nodes stay", "if now_s - heard_s > EXPIRE_S]", "if False]"),
    (
        "forgotten nodes are unknown",
        "            self._forgotten[node] = None\n",
        "            pass\n",
    ),
    (
        "forgotten nodes are not bounded",
        "        while len(self._forgotten) > MAX_FORGOTTEN:\n",
        "        while False:\n",
    ),
    (
        "another process with the same sequence is not noticed",
        "if announcement.sequence == own.sequence and announcement != own:",
        "if False:",
    ),
    (
        "paths do not follow changed links",
        "        if kept is None or kept.neighbours != announcement.neighbours:\n",
        "        if kept is None:\n",
    ),
)

ANNOUNCEMENT = mutants(
    "dialects/gsb/network/announcement.py",
    (
        "signatures are not checked",
        "        if not verify(message.public_key, message.signature,",
        "        if False and not verify(message.public_key, message.signature,",
    ),
    (
        "the exchange key is not signed",
        "return public, exchange, *numbers,",
        "return public, *numbers,",
    ),
    (
        "the instance is not signed",
        'numbers = instance.to_bytes(8, "big"), sequence.to_bytes(8, "big")',
        'numbers = (sequence.to_bytes(8, "big"),)',
    ),
    (
        "neighbours are not signed",
        '*numbers, ",".join(neighbours).encode()',
        "*numbers",
    ),
    (
        "neighbours may be repeated",
        "            and list(neighbours) == sorted(set(neighbours))\n",
        "",
    ),
    (
        "neighbours may be any bytes",
        "all(len(one) == ID_BYTES for one in message.neighbours)",
        "True",
    ),
    (
        "a sequence may be 0",
        "0 < message.sequence <= MAX_SEQUENCE",
        "message.sequence <= MAX_SEQUENCE",
    ),
    ("a sequence may be any", "0 < message.sequence <= MAX_SEQUENCE", "0 < message.sequence"),
    ("any number of neighbours", "if len(message.neighbours) > MAX_NEIGHBOURS:", "if False:"),
)

HANDSHAKE = [
    *mutants(
        "dialects/gsb/network/link_handshake.py",
        (
            "any version is accepted",
            "        if hello.version != VERSION:\n",
            "        if False:\n",
        ),
        (
            "signatures are not checked",
            "if len(signature) != SIGNATURE_BYTES or not verify(",
            "if False and not verify(",
        ),
        (
            "the expected node is not checked",
            "if self._expected and not hmac.compare_digest(self.node_id, self._expected):",
            "if False:",
        ),
        ("nonces have any length", " or len(nonce) != NONCE_BYTES:", ":"),
        ("a second hello is answered", "if self._transcript or len(public)", "if len(public)"),
    ),
    Patch(
        "the certificate is not signed",
        "dialects/gsb/network/link_handshake.py",
        'accept.instance.to_bytes(8, "big")),\n            self._digest,\n',
        'accept.instance.to_bytes(8, "big")),\n',
        (
            Edit(
                "dialects/gsb/network/link_handshake.py",
                'self._instance.to_bytes(8, "big")),\n            self._digest,\n',
                'self._instance.to_bytes(8, "big")),\n',
            ),
        ),
    ),
]

CHANNELS = mutants(
    "dialects/gsb/network/channels.py",
    (
        "nodes read topics without a right",
        "        if not broker.policy.allows(origin.identity, SUBSCRIBE, topic):\n",
        "        if False:\n",
    ),
    (
        "nodes read private topics",
        "        if not topic.startswith(PUBLIC.encode()):\n",
        "        if False:\n",
    ),
    (
        "names of users leave the bus",
        '            packet.broadcast_request.caller = ""',
        "            pass",
    ),
    (
        "messages too large for a link are sent",
        "if len(data) + RELAY_BYTES > self._server.limits.max_packet_bytes:",
        "if False:",
    ),
    (
        "a feed sends without credit",
        "            elif call.can_forward(True):\n",
        "            elif True:\n",
    ),
    (
        "a message that is not one ends the loop",
        "            except DecodeError:\n",
        "            except ZeroDivisionError:\n",
    ),
    (
        "full subscribers get messages",
        "                if session.full:\n",
        "                if False:\n",
    ),
    (
        "an early unsubscribe is not answered",
        "        for then in ended:\n",
        "        for then in ():\n",
    ),
    (
        "a channel without subscribers stays",
        "        if not self.subscribers:\n            self.close()\n",
        "",
    ),
    (
        "a broken stream is not opened again",
        "        if self._is_confirmed and status.code in LASTING:\n",
        "        if False:\n",
    ),
    (
        "users' shares are not released",
        "            self._channels.shares.release(account)\n",
        "            pass\n",
    ),
    (
        "every connection takes a share",
        "if is_new and (channel is None or not channel.accounts[identity.account_name]):",
        "if is_new:",
    ),
    (
        "nodes' shares are not released",
        "            self._feed_shares.release(feed.identity.account_name)\n",
        "            pass\n",
    ),
    (
        "feeds go on without a right",
        "            if feed.call is not None and not allows(feed.identity, SUBSCRIBE, feed.topic):\n",
        "            if False:\n",
    ),
    (
        "subscriptions go on without a right",
        "                if not allows(session.connection.pipe.identity, SUBSCRIBE, name):\n",
        "                if False:\n",
    ),
    (
        "users subscribe without a right",
        "        if not broker.policy.allows(session.connection.pipe.identity, SUBSCRIBE, name):\n",
        "        if False:\n",
    ),
)

RULES = mutants(
    "dialects/gsb/network/node_rules.py",
    (
        "any rule grants the service",
        "if not verdict.allowed or verdict.by is None or verdict.by.rule.pattern != PUBLIC_ACL:",
        "if not verdict.allowed:",
    ),
    (
        "every node changes rules",
        "if not verdict.allowed or verdict.by is None or verdict.by.rule.pattern != PUBLIC_ACL:",
        "if False:",
    ),
    (
        "rules for users are changed",
        "return rule.who.kind == NODE and rule.verbs",
        "return rule.verbs",
    ),
    ("rules for any verb are changed", "rule.verbs == (CALL,) and is_public", "is_public"),
    (
        "rules for private names are changed",
        "rule.pattern.startswith(PUBLIC) and not is_own",
        "not is_own",
    ),
    (
        "the right is passed on",
        "    is_own = rule.pattern.startswith(RESERVED_PUBLIC)\n",
        "    is_own = False\n",
    ),
    (
        "a deny rule locks the others out",
        "    is_own = is_own or (rule.effect == DENY and not rule.is_exact)\n",
        "",
    ),
    (
        "changes are not bounded",
        "        if len(self._tasks) >= MAX_CHANGES:\n",
        "        if False:\n",
    ),
)

NETWORK = [
    *mutants(
        "dialects/gsb/server/service_registry.py",
        (
            "a call goes back where it came from",
            "        if link.endpoint is peer:\n",
            "        if False:\n",
        ),
    ),
    *mutants(
        "dialects/gsb/network/network.py",
        (
            "any node may link",
            "        if allowed and link.node_id not in allowed:\n",
            "        if False:\n",
        ),
        (
            "strangers take the places of dialled nodes",
            "        return others + len(self.dialled) < self._limits.max_links\n",
            "        return others < self._limits.max_links\n",
        ),
        (
            "a dialled node that dials takes a second place",
            "link.node_id not in self.dialled.values() and not self.has_room()",
            "not self.has_room()",
        ),
        (
            "announcements are not counted",
            "        link.announcements_left -= len(message.announcements)\n",
            "",
        ),
        (
            "a ping may have any size",
            "        if name == PUBLIC_PING and len(data) > MAX_PING_BYTES:\n",
            "        if False:\n",
        ),
        (
            "handshakes may take forever",
            "            if now_s - link.began_s > HANDSHAKE_TIMEOUT_S:\n",
            "            if False:\n",
        ),
        (
            "refused channels are the neighbour's",
            "            refusal = route._replace(origin=origin)\n",
            "            refusal = route\n",
        ),
    ),
    *mutants(
        "dialects/gsb/network/link.py",
        (
            "credit may be any number",
            "        if not 0 < credit.replies <= MAX_CREDIT:\n",
            "        if False:\n",
        ),
        (
            "a link is used before it is checked",
            "            self._handshake.on_proof(packet.link_proof)\n            self._network.check(self)\n",
            "            self._handshake.on_proof(packet.link_proof)\n",
        ),
    ),
    *mutants(
        "dialects/gsb/network/link_dialler.py",
        (
            "links to other machines need no TLS",
            "        if not (self.address.is_encrypted or self.address.is_loopback):\n",
            "        if False:\n",
        ),
        (
            "a removed link is dialled again",
            "        ending = asyncio.get_running_loop().create_task(found.close())\n",
            "        ending = asyncio.get_running_loop().create_task(asyncio.sleep(0))\n",
        ),
    ),
]

ALL = [*TOPOLOGY, *ANNOUNCEMENT, *HANDSHAKE, *CHANNELS, *RULES, *NETWORK]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-gsb-network"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
