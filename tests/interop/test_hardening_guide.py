"""The commands of the hardening guide run as written, one after the other."""

from __future__ import annotations

from tests.rig.guide_page import GuidePage


def test_commands_of_the_guide_succeed_or_fail_as_documented():
    page = GuidePage("hardening.md")
    page.run("".join(page.snippets("sh")), ports=["6570", "6568"])
