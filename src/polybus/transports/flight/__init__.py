"""The Arrow Flight transport of the native port.

Its compiled part links to the libraries inside pyarrow, which must be loaded first. Their
file names contain a version, so a build for another version of pyarrow does not load.
"""

import pyarrow.flight

from polybus.errors import ConfigError

try:
    import polybus.kernel.flight_port  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"the native port was compiled for another pyarrow than {pyarrow.__version__}:"
        f" install polybus again ({error})"
    ) from None
