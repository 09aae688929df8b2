"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell without job control starts background jobs with SIGINT ignored, and children inherit that: a run of
# the tests in the background would see no process react to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
