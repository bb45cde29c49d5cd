"""The commands and the code of the resharding guide run as written."""

from __future__ import annotations

from tests.rig.guide_page import GuidePage

URL = "polybus://127.0.0.1:6570"
CHECKS = f"""polybus-python guide.py {URL}
polybus topic info orders --json | grep '"generation": 4'
"""


def test_snippets_of_the_guide_drain_and_refuse_as_documented():
    page = GuidePage("resharding.md")
    (code,) = page.snippets("python")
    run = page.run(
        "".join(page.snippets("sh")) + CHECKS,
        ports=["6570"],
        env={"POLYBUS_URL": URL},
        files={"guide.py": f"import sys\n\nurl = sys.argv[1]\n{code}"},
    )
    assert "draining: group billing has 1 shard (" in run.stdout
    assert "is still draining: group billing has 1 shard (" in run.stderr
