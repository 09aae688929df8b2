"""A progress line on stderr: rewritten in place on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

from headrace.cli.common import put

TERMINAL_INTERVAL_S = 0.2
PLAIN_INTERVAL_S = 5.0


class ProgressLine:
    """Shows the latest text, seldom enough to cost nothing. ``make_text`` runs only when it is shown."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._interval_s = TERMINAL_INTERVAL_S if self._is_terminal else PLAIN_INTERVAL_S
        self._shown_s = time.monotonic()
        self._width = 0

    def show(self, make_text: Callable[[], str]) -> None:
        """Show the text if it is time to."""
        now_s = time.monotonic()
        if now_s - self._shown_s < self._interval_s:
            return
        self._shown_s = now_s
        text = make_text()
        if self._is_terminal:
            # A line that wraps could not be rewritten: the next one would start below it.
            text = text[: shutil.get_terminal_size().columns - 1]
            put("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            put(text + "\n")

    def clear(self) -> None:
        """Take the line away, so that the result stands alone."""
        if self._is_terminal and self._width:
            put("\r" + " " * self._width + "\r")
            self._width = 0
