"""The snippets of the guide on delays run as written."""

from __future__ import annotations

from tests.rig.guide_page import GuidePage
from tests.rig.native_bus import NativeBus


def test_snippets_of_the_guide_delay_and_expire_messages():
    page = GuidePage("delays.md")
    commands = page.snippets("sh")
    programs = {f"snippet{n}.py": code for n, code in enumerate(page.snippets("python"))}
    assert len(commands) == len(programs) == 2
    script = "".join([*commands, *(f"polybus-python {name}\n" for name in programs)])
    with NativeBus() as bus:
        page.run(script, env={"POLYBUS_URL": bus.url}, files=programs)
        with bus.client() as client:
            assert client.topic("alerts")["settings"]["expired"] == "dead-letter"
            assert client.topic("reminders")["delayed"]["messages"] >= 2
