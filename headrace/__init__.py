"""headrace: a ZeroMQ broker that batches frames by size class and feeds GPU workers."""

from __future__ import annotations

__version__ = "0.1.0"
