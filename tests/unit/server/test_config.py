"""Settings: which source wins, and one clear line for everything that is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.rqueue.limits import RqueueLimits
from polybus.errors import ConfigError
from polybus.model.access_rule import Rule
from polybus.model.limits import Limits
from polybus.server.config import (
    DEFAULT,
    NOT_SETTINGS,
    Flag,
    load,
    setting_bounds,
    setting_keys,
)
from polybus.server.settings import Settings


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "polybus.toml"
    path.write_text(text)
    return path


def complaint(**arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_apply_without_sources():
    loaded = load()
    assert loaded.settings == Settings()
    assert {source for _, _, source in loaded.rows()} == {DEFAULT}


def test_flag_beats_variable_beats_file_beats_default(tmp_path):
    file = write(
        tmp_path,
        "[limits]\nmax_connections = 1\nmax_topics = 1\n"
        "outbox_max_bytes = 100000\noutbox_high_water_bytes = 65536\n",
    )
    environ = {"POLYBUS_LIMITS_MAX_CONNECTIONS": "2", "POLYBUS_LIMITS_MAX_TOPICS": "2"}
    loaded = load(file, environ, {"limits.max_connections": Flag("--max-connections", 3)})
    assert loaded.settings.limits.max_connections == 3
    assert loaded.settings.limits.max_topics == 2
    assert loaded.settings.limits.outbox_max_bytes == 100_000
    assert loaded.settings.limits.slow_consumer_timeout_s == 5.0
    sources = {key.dotted: source for key, _, source in loaded.rows()}
    assert sources["limits.max_connections"] == "--max-connections"
    assert sources["limits.max_topics"] == "$POLYBUS_LIMITS_MAX_TOPICS"
    assert sources["limits.outbox_max_bytes"] == str(file)
    assert sources["limits.slow_consumer_timeout_s"] == DEFAULT


def test_flag_with_value_none_is_ignored():
    loaded = load(
        None, {"POLYBUS_DURABILITY": "interval"}, {"durability": Flag("--durability", None)}
    )
    assert loaded.settings.durability == "interval"


def test_every_kind_of_value_from_a_file(tmp_path):
    file = write(
        tmp_path,
        """
        listen = ["rqueue=tcp://127.0.0.1:0", "admin=unix:/x"]
        data = "somewhere"
        durability = "interval"
        insecure = true
        [rqueue]
        max_payload = 4096
        part_timeout_s = 3
        [tls]
        certificate = "/abs/cert.pem"
        key = "key.pem"
        """,
    )
    settings = load(file).settings
    assert settings.listen == ("rqueue=tcp://127.0.0.1:0", "admin=unix:/x")
    assert settings.data == tmp_path / "somewhere"
    assert settings.durability == "interval"
    assert settings.insecure is True
    assert settings.section("rqueue") == RqueueLimits(max_payload=4096, part_timeout_s=3.0)
    assert settings.tls.certificate == Path("/abs/cert.pem")
    assert settings.tls.key == tmp_path / "key.pem"


def test_every_kind_of_value_from_the_environment():
    environ = {
        "POLYBUS_LISTEN": "rqueue=tcp://127.0.0.1:0, admin=unix:/x",
        "POLYBUS_DATA": "somewhere",
        "POLYBUS_INSECURE": "Yes",
        "POLYBUS_RQUEUE_MAX_PAYLOAD": "4096",
        "POLYBUS_RQUEUE_PART_TIMEOUT_S": "1.5",
        "POLYBUS_LOG_FORMAT": "json",
    }
    settings = load(None, environ).settings
    assert settings.listen == ("rqueue=tcp://127.0.0.1:0", "admin=unix:/x")
    assert settings.data == Path("somewhere")
    assert settings.insecure is True
    assert settings.section("rqueue") == RqueueLimits(max_payload=4096, part_timeout_s=1.5)
    assert settings.log.format == "json"


def test_rules_from_a_file_and_from_the_environment(tmp_path):
    file = write(tmp_path, 'acl = ["deny user:1 produce a*", "allow everyone call,create b"]')
    rules = (Rule.parse("deny user:1 produce a*"), Rule.parse("allow everyone create,call b"))
    assert load(file).settings.acl == rules
    environ = {"POLYBUS_ACL": "deny user:1 produce a* ; allow everyone call,create b;"}
    assert load(None, environ).settings.acl == rules


def test_quotas_of_users_from_a_file_and_from_the_environment(tmp_path):
    file = write(tmp_path, "[quotas]\nquota_topics = 0\n[quotas.users.alice]\nquota_bytes = 5\n")
    quotas = load(file).settings.quotas
    assert quotas.quota_topics == 0
    assert quotas.users == {"alice": {"quota_bytes": 5}}
    environ = {"POLYBUS_QUOTAS_USERS": "{alice = {quota_bytes = 5}, 1000 = {}}"}
    assert load(None, environ).settings.quotas.users == {"alice": {"quota_bytes": 5}, "1000": {}}


def test_sources_can_be_read_again(tmp_path):
    file = write(tmp_path, "durability = 'fsync'")
    loaded = load(None, {"POLYBUS_CONFIG": str(file)})
    file.write_text("durability = 'interval'")
    assert loaded.again is not None
    assert loaded.again().settings.durability == "interval"
    assert loaded.settings.durability == "fsync"


def test_empty_variable_counts_as_unset():
    assert load(None, {"POLYBUS_RQUEUE_MAX_PAYLOAD": "", "POLYBUS_DATA": ""}).settings == Settings()


def test_variable_may_name_the_config_file(tmp_path):
    file = write(tmp_path, "durability = 'interval'")
    assert load(None, {"POLYBUS_CONFIG": str(file)}).settings.durability == "interval"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("acl = 'x'", "acl: expected a list of strings"),
        ("acl = ['allow user:a x y']", "acl: 'allow user:a x y': unknown verb 'x'"),
        ("[quotas]\nquota_bytes = -1", "expected a whole number of at least 0"),
        ("[quotas]\nusers = 1", "[quotas] users: expected a table of users, each with some of"),
        ("[quotas.users]\nalice = 1", "expected a table of users"),
        ("[quotas.users.alice]\nbytes = 1", "for alice only quota_bytes"),
        ("[quotas.users.alice]\nquota_bytes = -1", "for alice quota_bytes = a whole number"),
        ("[quotas.users.alice]\nquota_bytes = true", "for alice quota_bytes = a whole number"),
        ("limit = 1", "no section or key is called 'limit': did you mean 'limits'?"),
        ("[rqueu]\nx = 1", "no section or key is called 'rqueu': did you mean 'rqueue'?"),
        ("[rqueue]\nmax_payloads = 1", "[rqueue] has no key 'max_payloads': did you mean 'max_pay"),
        ("rqueue = 1", "[rqueue] is a section"),
        (
            "[rqueue]\nmax_payload = '4096'",
            "[rqueue] max_payload: expected a whole number, found '4",
        ),
        ("[rqueue]\nmax_payload = 4096.0", "expected a whole number, found 4096.0"),
        ("[rqueue]\nmax_payload = true", "expected a whole number, found True"),
        ("[rqueue]\nmax_payload = 281", "expected a whole number from 282 to 67108864, found 281"),
        ("[rqueue]\npart_timeout_s = 0", "expected a number above 0, found 0"),
        ("[rqueue]\npart_timeout_s = inf", "expected a finite number"),
        ("[rqueue]\npart_timeout_s = nan", "expected a finite number"),
        ("[rqueue]\npart_timeout_s = true", "expected a number, found True"),
        ("[limits]\nmax_topics = 0", "expected a whole number from 1 to"),
        ("[server]\ndrain_timeout_s = 9", "expected a number from 0 to 8, found 9"),
        ("listen = 'rqueue=x'", "listen: expected a list of strings"),
        ("listen = [1]", "listen: expected a list of strings"),
        ("durability = 'often'", "durability: expected one of fsync, interval, found 'often'"),
        ("insecure = 1", "insecure: expected true or false, found 1"),
        ("data = 1", "data: expected a path, found 1"),
        ("data = ''", "data: expected a path"),
        ("data = '~no-such-user/x'", "home"),
        ("engine = 1", "engine: expected a string"),
        ("[tls]\ncertificate = 'a'", "[tls] has a certificate alone"),
        ("[tls]\nkey = 'a'", "[tls] has a key alone"),
        (
            "[limits]\noutbox_max_bytes = 65536",
            "[limits] outbox_high_water_bytes: expected at most outbox_max_bytes (65536), found 41",
        ),
        (
            "[rqueue]\nmax_payload = 67108864",
            "[rqueue] max_payload: expected below [limits] outbox_max_bytes (67108864)",
        ),
        ("x = ", "not valid TOML"),
        ("a = 1\na = 2", "not valid TOML"),
        ("log = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_invalid_file_is_one_clear_line(tmp_path, text, says):
    file = write(tmp_path, text)
    said = complaint(file=file)
    assert says in said
    assert said.startswith((f"{file}: ", "default: "))


def test_unreadable_files(tmp_path):
    assert "No such file" in complaint(file=tmp_path / "none.toml")
    assert "Is a directory" in complaint(file=tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"a = '\xff'")
    assert "not UTF-8 text (byte 5)" in complaint(file=tmp_path / "bytes.toml")
    assert "at most 1048576 bytes" in complaint(file=Path("/dev/zero"))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("POLYBUS_RQUEUE_MAX_PAYLOAD", "big", "expected a whole number, found 'big'"),
        ("POLYBUS_RQUEUE_MAX_PAYLOAD", "1", "expected a whole number from 282 to"),
        ("POLYBUS_RQUEUE_PART_TIMEOUT_S", "nan", "expected a finite number"),
        ("POLYBUS_INSECURE", "maybe", "expected true or false, found 'maybe'"),
        ("POLYBUS_DURABILITY", "often", "expected one of fsync, interval"),
        ("POLYBUS_RQUEUE_MAX_PAYLOAD", "9" * 5000, "expected a whole number"),
    ],
)
def test_invalid_variable_is_one_clear_line(name, text, says):
    said = complaint(environ={name: text})
    assert said.startswith(f"${name}: ")
    assert says in said
    assert len(said) < 250


def test_unknown_variables_warn_and_change_nothing():
    environ = {"POLYBUS_PORT": "tcp://10.0.0.1:1", "POLYBUS_RQUEU_MAX_PAYLOAD": "1", "OTHER": "x"}
    loaded = load(None, environ)
    assert loaded.settings == Settings()
    assert loaded.warnings == (
        "$POLYBUS_PORT is not a setting of polybus and is ignored",
        "$POLYBUS_RQUEU_MAX_PAYLOAD is not a setting of polybus and is ignored:"
        " did you mean 'POLYBUS_RQUEUE_MAX_PAYLOAD'?",
    )


def test_known_other_variables_do_not_warn():
    environ = dict.fromkeys(NOT_SETTINGS - {"POLYBUS_CONFIG"}, "x")
    assert load(None, environ).warnings == ()


def test_no_two_settings_share_a_variable():
    names = [key.variable for key in setting_keys().values()]
    assert len(set(names)) == len(names)
    assert not NOT_SETTINGS & set(names)


def test_bounds_belong_to_settings_and_hold_for_defaults():
    values = {key.dotted: value for key, value, _ in load().rows()}
    for dotted, (low, high) in setting_bounds().items():
        assert low <= values[dotted] <= high


def test_every_limit_is_a_setting():
    for section, kind in (("limits", Limits), ("rqueue", RqueueLimits)):
        for field in dataclasses.fields(kind):
            assert f"{section}.{field.name}" in setting_keys()


@given(st.sampled_from(sorted(setting_keys())), st.text(min_size=1, max_size=20))
def test_any_text_in_any_variable_is_a_value_or_one_clear_line(dotted, text):
    key = setting_keys()[dotted]
    said, source = "", ""
    try:
        source = load(None, {key.variable: text}).sources[dotted]
    except ConfigError as error:
        said = str(error)
    assert source == f"${key.variable}" or said.startswith((f"${key.variable}: ", "default: "))
    assert "\n" not in said
