"""The commands of the guide to the network run as written, one after the other."""

from __future__ import annotations

from tests.rig.guide_page import GuidePage

PORTS = ("7001", "7101", "7002", "7102", "7003")
READY = "until (exec 3<>/dev/tcp/127.0.0.1/{}) 2>/dev/null; do sleep 0.1; done\n"


def test_commands_of_the_guide_print_the_documented_reply():
    page = GuidePage("gsb-network.md")
    first, *others = page.snippets("sh")
    started = "".join(READY.format(port) for port in ("7001", "7002", "7003"))
    run = page.run("".join([first, started, *others]), PORTS)
    assert run.stdout.rstrip().endswith('"HELLO"'), run.stdout
