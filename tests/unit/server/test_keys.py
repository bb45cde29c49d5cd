"""CURVE keys on disk, and the commands for them."""

from __future__ import annotations

import json
import stat

import pytest
import zmq
import zmq.auth
from zmq.utils import z85

from polybus.cli.main import run
from polybus.dialects.pirate.client_id import fingerprint
from polybus.dialects.pirate.server import curve_key_folder
from polybus.dialects.pirate.server.curve_key_folder import AllowedKey, CurveKeyFolder
from polybus.errors import AlreadyExists, ConfigError, DoesNotExist, UsageError

KEY = bytes(range(32))


def test_key_pair_is_two_files_and_the_secret_one_is_private(tmp_path):
    public, secret = curve_key_folder.make_pair(tmp_path / "new" / "folder", "client")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    pair = zmq.auth.load_certificate(secret)
    assert zmq.auth.load_certificate(public) == (pair[0], None)
    assert pair[1] is not None
    assert zmq.curve_public(pair[1]) == pair[0]
    assert curve_key_folder.read_public(public) == z85.decode(pair[0])
    with pytest.raises(AlreadyExists):
        curve_key_folder.make_pair(public.parent, "client")
    assert sorted(path.name for path in public.parent.iterdir()) == [
        "client.key", "client.key_secret",
    ]  # fmt: skip


def test_server_key_pair_is_created_once(tmp_path):
    folder = CurveKeyFolder(tmp_path / "pirate")
    own = folder.load_own_pair()
    assert zmq.curve_public(own.secret) == own.public
    assert folder.load_own_pair() == own
    secret = tmp_path / "pirate" / "server.key_secret"
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        folder.load_own_pair()
    secret.chmod(0o600)
    secret.write_text("nonsense")
    with pytest.raises(ConfigError):
        folder.load_own_pair()


def test_keys_are_allowed_and_revoked_by_name_fingerprint_and_key(tmp_path):
    folder = CurveKeyFolder(tmp_path)
    assert folder.allowed() == []
    others = [bytes([n]) * 32 for n in (1, 2, 3)]
    for name, key in zip("abc", others, strict=True):
        folder.allow(key, name)
    assert [one.name for one in folder.allowed()] == ["a", "b", "c"]
    found = folder.allowed()
    assert bytes.fromhex(found[0].fingerprint) == fingerprint(others[0])
    folder.revoke("a")
    folder.revoke(found[1].fingerprint)
    folder.revoke(found[2].text)
    assert folder.allowed() == []
    with pytest.raises(DoesNotExist):
        folder.revoke("a")


def test_key_folder_shows_allowed_revoked_and_replaced_keys(tmp_path):
    folder = CurveKeyFolder(tmp_path)
    marks = [folder.read_fingerprint()]
    folder.allow(KEY, "alice")
    marks.append(folder.read_fingerprint())
    assert folder.read_fingerprint() == marks[-1]
    # As an editor does it, or a copy: neither the folder nor the size has changed then.
    (tmp_path / "allowed" / "alice.key").write_text(
        curve_key_folder._text(AllowedKey("", bytes(32)).text.encode())
    )
    marks.append(folder.read_fingerprint())
    folder.allow(KEY, "bob")
    marks.append(folder.read_fingerprint())
    assert len(set(marks)) == 4
    folder.revoke("bob")
    assert folder.read_fingerprint() == marks[2]


def test_key_and_name_are_unique(tmp_path):
    folder = CurveKeyFolder(tmp_path)
    folder.allow(KEY, "alice")
    with pytest.raises(AlreadyExists, match="alice"):
        folder.allow(KEY, "bob")
    with pytest.raises(AlreadyExists, match="another key"):
        folder.allow(bytes(32), "alice")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "-a", "a b", "ä", "a\n", "x" * 200])
def test_key_name_must_be_a_file_name(tmp_path, name):
    with pytest.raises(UsageError):
        CurveKeyFolder(tmp_path).allow(KEY, name)
    with pytest.raises(UsageError):
        curve_key_folder.make_pair(tmp_path, name)


@pytest.mark.parametrize("text", ["", "short", "x" * 39, "x" * 41, "ä" * 40, "\x7f" * 40])
def test_invalid_key_is_an_error(text):
    with pytest.raises(UsageError, match="invalid key"):
        curve_key_folder.parse_key(text)


def test_key_with_surrounding_text_is_accepted():
    assert curve_key_folder.parse_key(AllowedKey("", KEY).text) == KEY


def test_invalid_key_file_is_an_error(tmp_path):
    folder = CurveKeyFolder(tmp_path)
    folder.allow(KEY, "good")
    (tmp_path / "allowed" / "bad.key").write_text("hello")
    with pytest.raises(ConfigError, match=r"bad\.key"):
        folder.allowed()


def test_key_commands(tmp_path, capsys):
    data, own = str(tmp_path / "data"), str(tmp_path / "own")
    assert run(["keys", "new", "laptop", "--keys", own]) == 0
    assert "client id" in capsys.readouterr().out
    assert run(["keys", "ls", "--data", data]) == 0
    assert "no key is allowed" in capsys.readouterr().out
    assert run(["keys", "allow", f"{own}/laptop.key", "--data", data]) == 0
    assert capsys.readouterr().out.startswith("allowed: laptop, client ")
    text = AllowedKey("", KEY).text
    assert run(["keys", "allow", text, "--data", data]) == 2
    assert run(["keys", "allow", text, "--name", "bob", "--data", data]) == 0
    capsys.readouterr()
    assert run(["keys", "ls", "--json", "--data", data]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed["allowed"]] == ["bob", "laptop"]
    assert listed["allowed"][0]["key"] == text
    assert run(["keys", "revoke", "bob", "--data", data]) == 0
    assert run(["keys", "revoke", "bob", "--data", data]) != 0
    assert "polybus keys ls" in capsys.readouterr().err
    assert run(["keys", "allow", "nonsense", "--name", "x", "--data", data]) == 2
