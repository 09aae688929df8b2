"""Adapters turn the rows of a model's outputs into the results of frames: values, tensors, or an error each.

``load_adapter(name, options)`` gives one; ``adapter.process(outputs, placements)`` gives exactly one
FrameResult per frame, in order, whatever happens to any of them. ``check_adapter(name, options)`` finds what
is wrong with a configuration without loading one.
"""

from headrace.workers.adapters.base import Adapter, AdapterError, RowResult
from headrace.workers.adapters.registry import check_adapter, load_adapter

__all__ = ["Adapter", "AdapterError", "RowResult", "check_adapter", "load_adapter"]
