"""The `polybus` command: help, usage errors, imported modules."""

from __future__ import annotations

import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polybus import __version__
from polybus.cli import main
from polybus.cli.main import all_commands
from polybus.testing.bus_process import clean_environment, run


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return clean_environment(tmp_path)


def one_line(text: str) -> str:
    assert re.fullmatch(r"polybus: [^\n]+\n", text), text
    return text


def test_help_lists_every_command():
    done = run("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for name, (_module, help_line) in all_commands().items():
        assert re.search(rf"^  {name} +{re.escape(help_line)}$", done.stdout, re.MULTILINE)


def test_without_a_command_help_is_printed():
    assert run().stdout == run("--help").stdout


def test_version():
    assert run("--version").stdout == f"polybus {__version__}\n"


@pytest.mark.parametrize("name", sorted(all_commands()))
def test_every_command_has_help(name):
    done = run(name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: polybus {name} ")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["serve"], "--listen DIALECT=ADDRESS  Listen only at the given addresses; repeatable."),
        (["serve"], "--data DIR  Data folder."),
        (["pub"], "--whole  Publish all of stdin as one message."),
        (["pub"], "Key of every message. [default: no key]"),
        (["sub"], "-e, --exit  Exit after the last message that exists now."),
        (["sub"], "Start position: earliest, latest, an id, or @TIME"),
        (["sub"], "Exit after N messages; 0: no limit."),
        (["topic"], "create  Create a topic."),
        (["topic", "create"], "--keep all|read  Keep all messages, or each until"),
        (["topic", "configure"], "--retain-age 7d|none  Remove older messages; ms, s, m, h or d."),
        (["topic", "pause"], "--produce  Only producing."),
        (["topic", "trim"], "Remove messages before this position (exclusive)"),
        (["topic", "ls"], "Only topics that match; * matches any characters."),
        (["topic", "stats"], "--watch  Repeat until interrupted, with rates."),
        (["group"], "reset  Set the position of a group."),
        (["group", "reset"], "--force  Proceed even if the group has live consumers."),
        (["group", "rm"], "-y, --yes  Do not ask for confirmation."),
        (
            ["acl", "test"],
            "Show whether WHO may do VERB (exit code 0, else 4) and the deciding rule.",
        ),
        (["config"], "check  Check whether a bus would start with this configuration."),
        (["connections"], "--admin PATH  Path of the admin socket, if it is not the default."),
        (["stats"], "--json  Print JSON."),
        (["pipeline"], "3 no bus answers, or the connection was lost"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_describes_flags_in_plain_words(args, line):
    """Columns and line breaks depend on the terminal, so only the words are compared."""
    shown = run(*args, "--help").stdout
    assert " ".join(line.split()) in " ".join(shown.split())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["srve"], "No such command 'srve'"),
        (["--frob"], "No such option: --frob"),
        (["serve", "--lisen", "x"], "No such option: --lisen"),
        (["serve", "--listen"], "--listen"),
        (["serve", "extra"], "extra"),
        (["serve", "--listen", "rqueue"], "'rqueue' is not DIALECT=ADDRESS"),
        (["serve", "--listen", "console=tcp://127.0.0.1:0"], "unknown dialect 'console'"),
        (["serve", "--listen", "rqueue=tcp://0.0.0.0:0"], "insecure = true"),
        (["serve", "--config", "/no/such.toml"], "/no/such.toml: cannot read"),
        (["serve", "--durability", "often"], "expected one of fsync, interval"),
        (["serve", "--log-level", "loud"], "expected one of debug, info"),
        (["serve", "--log-format", "xml"], "expected one of human, json"),
        (["serve", "--engine", "nats://x"], "still to come"),
        (["serve", "--data", "a", "--engine", "memory:"], "exclude each other"),
        (["rqueue", "--port", "x"], "--port"),
        (["rqueue", "--port", "70000"], "from 0 to 65535"),
        (["rqueue", "--port", "-1"], "from 0 to 65535"),
        (["rqueue", "--host", "0.0.0.0"], "insecure = true"),
        (["rqueue", "--host", "a b"], "impossible host"),
        (["rqueue", "--max-payload", "1"], "from 282 to"),
        (["rqueue", "--threads", "64"], "from 0 to 63"),
        (["rqueue", "--port", "1", "sink"], "must follow 'sink'"),
        (["rqueue", "frob"], "No such command 'frob'"),
        (["config"], "Missing command"),
        (["config", "check", "/no/such.toml"], "cannot read"),
    ],
)
def test_usage_error_is_one_line_and_exit_code_2(args, says, env, monkeypatch, capsys):
    for name in os.environ.keys() - env.keys():
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main.run(args) == 2
    out, err = capsys.readouterr()
    assert says in one_line(err)
    assert out == ""


def test_error_at_start_is_one_line(env):
    done = run("serve", "--data", "/proc/no", env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert "data folder /proc/no: cannot be made" in one_line(done.stderr)


@pytest.mark.parametrize("command", ["stats", "connections"])
def test_no_bus_is_one_line_and_exit_code_3(command, env):
    done = run(command, env=env)
    assert done.returncode == 3
    assert "no bus answers" in one_line(done.stderr)


def test_foreign_admin_socket_is_reported(env, tmp_path):
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as fake:
        fake.bind(str(path))
        fake.listen()
        command = [sys.executable, "-m", "polybus", "stats", "--admin", str(path)]
        child = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        link, _ = fake.accept()
        with link:
            link.sendall(b"HTTP/1.1 400 Bad Request\r\n")
            _, err = child.communicate(timeout=30)
    assert child.returncode == 5
    assert "it is not the admin socket of a bus" in one_line(err)


LOADED = (
    "import sys; from polybus.cli.main import run; code = run(sys.argv[1:]); print(*sys.modules)"
)
HEAVY = {"pyarrow", "pyspark", "zmq", "lmdb", "google", "rich", "structlog", "uvloop", "asyncio"}


def loaded_by(*args: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *args], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_help_loads_nothing_heavy():
    """Keeps `polybus --help` within its 300 ms."""
    # The registry of dialects reads entry points: importlib.metadata loads socket for email.
    assert not loaded_by("--help") & (HEAVY | {"pydantic", "ssl"})


# The commands of `pipeline` are made of functions of Spark: its help knows them only by loading.
@pytest.mark.parametrize("name", sorted(set(all_commands()) - {"pipeline"}))
def test_help_of_a_command_loads_nothing_heavy(name):
    assert not loaded_by(name, "--help") & (HEAVY | {"ssl"})


def test_closed_output_pipe_is_not_an_error(env):
    done = subprocess.run(
        f"{sys.executable} -m polybus config show | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("listen = ")
    assert done.stderr == ""


def test_full_disk_is_reported(env):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "polybus", "config", "show"]
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr.splitlines()[0]


def test_config_check_and_show(env, tmp_path):
    file = tmp_path / "bus.toml"
    file.write_text("[rqueue]\nmax_payload = 4096\n")
    done = run("config", "check", str(file), env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}: ok\n", "")
    shown = run("config", "show", str(file), env=env | {"POLYBUS_DURABILITY": "interval"}).stdout
    assert re.search(rf"^max_payload = 4096 +# {file}$", shown, re.MULTILINE)
    assert re.search(r'^durability = "interval" +# \$POLYBUS_DURABILITY$', shown, re.MULTILINE)
    assert re.search(r"^max_topics = 100000 +# default$", shown, re.MULTILINE)


def test_output_of_config_show_is_a_valid_config(env, tmp_path):
    file = tmp_path / "shown.toml"
    file.write_text(run("config", "show", env=env).stdout)
    assert run("config", "check", str(file), env=env).returncode == 0
    again = run("config", "show", "--json", env=env | {"POLYBUS_CONFIG": str(file)}).stdout
    first = run("config", "show", "--json", env=env).stdout
    values = re.compile(r'"source": ".*"')
    assert values.sub("", again) == values.sub("", first)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("listen = ['console=tcp://127.0.0.1:1']", "unknown dialect 'console'"),
        ("listen = ['rqueue=tcp://0.0.0.0:1']", "insecure = true"),
        ("[tls]\ncertificate = 'no.pem'\nkey = 'no.pem'", "no.pem: No such file"),
        ("engine = 'nats://x'", "still to come"),
        ("[native]\ntokens = 'no.tokens'", "no.tokens: cannot be read: No such file"),
    ],
)
def test_config_check_finds_start_errors(env, tmp_path, text, says):
    file = tmp_path / "bus.toml"
    file.write_text(text)
    done = run("config", "check", str(file), env=env)
    assert done.returncode == 2
    assert says in one_line(done.stderr)


def test_unknown_variable_is_a_warning(env):
    done = run("config", "check", env=env | {"POLYBUS_PORT": "x"})
    assert done.returncode == 0
    assert "POLYBUS_PORT is not a setting" in one_line(done.stderr)


def test_help_on_a_terminal_is_plain_text():
    controller, terminal = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "polybus", "--help"], stdout=terminal):
        os.close(terminal)
        text = b""
        try:
            while data := os.read(controller, 65536):
                text += data
        except OSError:
            pass  # the other end has closed
    os.close(controller)
    assert b"\x1b" not in text
    assert b"connections" in text
