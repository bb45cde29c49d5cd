"""The native port: Arrow Flight.

Its compiled part stands on the libraries inside pyarrow, which are loaded here first. Their
names carry their version: a polybus that was compiled for another pyarrow finds none.
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
