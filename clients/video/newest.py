"""Read a live source without falling behind: a reader thread that hands over the newest frame only.

A camera does not wait. When sending is slower than the camera, the frames in between are dropped here
and counted (``missed_count``), so that the age of what is sent stays that of one frame.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from headrace.clients.video.frames import VideoFrame, VideoSource


class NewestFrames:
    """Iterates over the newest frames of a source. Owns one reader thread, ended by ``close``."""

    def __init__(self, source: VideoSource) -> None:
        self.missed_count = 0
        self._source = source
        self._changed = threading.Condition()
        self._newest: VideoFrame | None = None
        self._is_done = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name=f"read {source.name}", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[VideoFrame]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._is_done)
                frame, self._newest = self._newest, None
            if frame is None:
                if self._error is not None:
                    raise self._error
                return
            yield frame

    def close(self) -> None:
        """Stop reading; an iteration under way ends."""
        self._source.close()
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            for frame in self._source.frames():
                with self._changed:
                    if self._is_done:
                        return
                    self.missed_count += self._newest is not None
                    self._newest = frame
                    self._changed.notify_all()
        except Exception as caught:  # noqa: BLE001  (carried to the iterating thread)
            error = caught
        finally:
            with self._changed:
                self._error = error
                self._is_done = True
                self._changed.notify_all()
