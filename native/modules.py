"""The one place that says which modules are compiled. All of them also run as they stand, as plain Python."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Folder at the top of the repository -> the package it is imported as.
FOLDERS = {
    "headrace": "headrace",
    "broker": "headrace.broker",
    "workers": "headrace.workers",
    "clients": "headrace.clients",
    "configs": "headrace.configs",
}

#: Folders of which every module is compiled but these: the shell, which mostly calls libraries, and the
#: decorator ``per_frame``.
ALL_BUT = {
    "headrace/protocol": {"__init__", "per_frame"},
    "broker": {
        "__init__", "arenas", "binding", "control", "counters", "http", "inbound", "journal", "journal_body",
        "journal_file", "metrics", "model_store", "monitors", "outbound", "port_owner", "process",
        "recording", "reload_desk", "shell", "shell_settings", "snapshot", "sockets",
    },
}  # fmt: skip

#: Folders of which these modules are compiled. Not ``drafts``: it takes what users pass, of whatever type.
ONLY: dict[str, set[str]] = {
    "clients": {
        "held", "positions", "producer_session", "records", "seq_runs", "stream_state", "subscriber_events",
        "subscriber_session",
    },
    "workers": {"results"},
    "headrace": {"slot_allocator"},
}  # fmt: skip


def compiled_sources() -> list[Path]:
    """Return the sources of the compiled modules, from the top of the repository, in order."""
    kept = [Path(folder, f"{name}.py") for folder, names in ONLY.items() for name in names]
    for folder, left_out in ALL_BUT.items():
        found = (ROOT / folder).glob("*.py")
        kept += [path.relative_to(ROOT) for path in found if path.stem not in left_out]
    return sorted(kept)


def imported_path(source: Path) -> str:
    """Return where a module lies in the package, for instance ``headrace/broker/core.py``."""
    return "/".join((*FOLDERS[source.parts[0]].split("."), *source.parts[1:]))
