"""Where the demo's progress goes: a live table when stderr is a terminal, else a line now and then."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live

from headrace.demo.live_table import DemoView, line_of, table_of

#: Plain lines are for logs: often enough to see that it lives.
LINE_INTERVAL_S = 2.0


class Display:
    """Shows notes and moments on ``stream``; a context manager, since a live table must be closed."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream)
        self._live: Live | None = None
        self._next_line_s = 0.0

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Show one line of text."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, view: DemoView) -> None:
        """Show a moment: redraw the table, or print a line if the last one is some time ago."""
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
            self._live.update(table_of(view), refresh=True)
        elif view.elapsed_s >= self._next_line_s:
            self._next_line_s = view.elapsed_s + LINE_INTERVAL_S
            self.note(line_of(view))
