"""dbus-daemon, from Debian, with a configuration that allows everything."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.freud.contract import SOCKET_FOLDER
from bench.harness.places import installed
from bench.harness.programs import Program
from bench.peers.dbus import SHAPES, RunningBus

DAEMON = "dbus-daemon"
CONFIG = """\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
  "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <auth>EXTERNAL</auth>
  <listen>unix:path={path}</listen>
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_destination="*"/>
    <allow receive_sender="*"/>
  </policy>
</busconfig>
"""


class DbusDaemon:
    name = DAEMON
    shapes = SHAPES

    @contextmanager
    def start(self) -> Iterator[RunningBus]:
        binary = installed(DAEMON, "apt-get install dbus-daemon")
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        version = said.stdout.split("\n")[0].split()[-1]
        with tempfile.TemporaryDirectory(prefix="pb-", dir=SOCKET_FOLDER) as folder:
            path, config = f"{folder}/bus.sock", Path(folder) / "bus.conf"
            config.write_text(CONFIG.format(path=path))
            options = ("--nofork", "--nosyslog", "--print-address")
            arguments: list[str | Path] = [binary, f"--config-file={config}", *options]
            with Program(self.name, arguments) as program:
                program.line()  # its address: it listens
                yield RunningBus(program.pid, version, path)
