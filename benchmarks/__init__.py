"""dtorch's claims about time and memory, each measured against its rivals in one run."""

import time

STARTED = time.monotonic()
"""When the process began to run this package, before it imported torch."""
