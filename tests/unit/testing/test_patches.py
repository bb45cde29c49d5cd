"""Every patch of the tests applies to the source as it is."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.rig import points, sabotage
from tests.rig.patching import PACKAGE, ROOT, DoesNotApply, Edit, Patch, patched_copy

MUTANTS = Path(__file__).parents[2] / "mutants"


def all_mutants() -> list[Patch]:
    modules = [import_module(f"tests.mutants.{file.stem}") for file in MUTANTS.glob("*.py")]
    found = [patch for module in modules for patch in vars(module).get("ALL", [])]
    assert found
    return found


def stale(patches: list[Patch]) -> list[str]:
    found = []
    for patch in patches:
        try:
            patch.texts()
        except DoesNotApply as error:
            found.append(str(error))
    return found


def test_sabotages_apply():
    assert not stale(sabotage.ALL)
    assert not sabotage.repeated_names()


def test_kill_points_apply_also_under_each_sabotage(tmp_path):
    assert not stale(points.ALL)
    for patch in sabotage.ALL:
        changed = patch.texts()
        for others in points.ALL:
            both = set(changed) & {edit.file for edit in others.edits}
            for file in both:
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / file).write_text(changed[file])
            edits = [edit for edit in others.edits if edit.file in both]
            if edits:
                Patch(others.name, *edits[0], tuple(edits[1:])).texts(tmp_path)


def test_mutants_apply():
    assert not stale(all_mutants())


def test_patched_modules_compile():
    """A module that cannot be imported fails every test and proves nothing about any."""
    for patch in [*all_mutants(), *sabotage.ALL, *points.ALL]:
        for file, text in patch.texts().items():
            if file.endswith(".py"):
                compile(text, f"{file} with {patch.name!r}", "exec")


def test_suites_of_mutants_exist():
    """A mutant whose tests are gone would be noticed by none of them."""
    missing = set()
    for file in MUTANTS.glob("*.py"):
        module = vars(import_module(f"tests.mutants.{file.stem}"))
        suites = [module.get("TESTS", ()), *module.get("SUITES", {}).values()]
        missing |= {path for suite in suites for path in suite if not (ROOT / path).exists()}
    assert not missing


@pytest.mark.parametrize("old", ["no such text", "import"])
def test_text_that_does_not_occur_once_is_refused(old):
    patch = Patch("p", "store/lmdb/write_txn.py", old, "")
    with pytest.raises(
        DoesNotApply, match=r"^p: store/lmdb/write_txn.py: its text occurs \d+ times"
    ):
        patch.texts()


def test_a_file_that_is_gone_is_refused():
    with pytest.raises(DoesNotApply, match="there is no file"):
        Patch("p", "store/lmdb/no_such.py", "a", "b").texts()


def test_a_copy_is_patched_and_the_original_is_not():
    file, old = "store/lmdb/write_txn.py", "        batch.encode_blocks()\n"
    before = (PACKAGE / file).read_bytes()
    more = Edit("store/lmdb/writer_state.py", "from __future__ import annotations\n", "# changed\n")
    folder = patched_copy([Patch("p", file, old, "", (more,))])
    assert (folder / "polybus" / file).read_text() == before.decode().replace(old, "")
    assert "# changed" in (folder / "polybus/store/lmdb/writer_state.py").read_text()
    assert (PACKAGE / file).read_bytes() == before
    assert "# changed" not in (PACKAGE / "store/lmdb/writer_state.py").read_text()
    unchanged = "store/lmdb/store_keys.py"
    assert (folder / "polybus" / unchanged).read_bytes() == (PACKAGE / unchanged).read_bytes()
