"""ONNX Runtime behind the device seam: sessions bound by address, on ``cuda`` or on ``cpu`` addresses.

The rules come from ONNX Runtime's CUDA provider (design note gpu.md, sections 0 to 2): a stream of ours as
``user_compute_stream``, bound memory that is never bound again, a graph id with every run, synchronisation
off for replays alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DeviceError, ModelError
from headrace.workers.cuda.device import (
    PLAIN,
    Binding,
    BoundTensor,
    CudaFaultError,
    OutOfMemoryError,
    RunFailedError,
    SessionOptions,
    classify,
)
from headrace.workers.onnx_model import OnnxModel, first_line, open_session

if TYPE_CHECKING:
    import onnxruntime

CUDA_PROVIDER = "CUDAExecutionProvider"
CPU_PROVIDER = "CPUExecutionProvider"


@dataclass(frozen=True, slots=True)
class OrtBinding:
    """An IOBinding, and what it holds: replay looks at neither, so the engine compares addresses itself."""

    io_binding: Any
    inputs: tuple[BoundTensor, ...]
    outputs: tuple[BoundTensor, ...]


class OrtSession:
    """A session whose tensors stand on ``device_type`` addresses. Errors are told by text: ONNX Runtime has
    no public root of its error classes."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        device_type: str,
        *,
        has_graphs: bool,
        strays: tuple[str, ...] = (),
    ) -> None:
        self._session = session
        self._device_type = device_type
        self._options: dict[tuple[int, bool], onnxruntime.RunOptions] = {}
        self.has_graphs = has_graphs
        self.strays = strays
        self.output_names: list[str] = [output.name for output in session.get_outputs()]

    def bind(self, inputs: Sequence[BoundTensor], outputs: Sequence[BoundTensor]) -> Binding:
        """Bind addresses; the memory is kept by its owner."""
        io_binding = self._session.io_binding()
        for bind, tensors in ((io_binding.bind_input, inputs), (io_binding.bind_output, outputs)):
            for each in tensors:
                kind = np.dtype(each.dtype).type
                bind(each.name, self._device_type, 0, kind, each.shape, each.address)
        return OrtBinding(io_binding, tuple(inputs), tuple(outputs))

    def run(self, binding: Binding, graph_id: int, *, is_synchronised: bool) -> None:
        """Run bound tensors; see ``device.Session``."""
        bound = cast("OrtBinding", binding)
        try:
            self._session.run_with_iobinding(bound.io_binding, self._run_options(graph_id, is_synchronised))
        except Exception as error:
            raise classify(str(error))(first_line(error)) from error

    def run_arrays(self, feeds: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.generic]]:
        """Run host arrays plainly; ONNX Runtime copies them in and out and waits."""
        try:
            outputs: list[NDArray[np.generic]] = self._session.run(
                self.output_names, dict(feeds), self._run_options(PLAIN, True)
            )
        except Exception as error:
            raise classify(str(error))(first_line(error)) from error
        return outputs

    def _run_options(self, graph_id: int, is_synchronised: bool) -> onnxruntime.RunOptions:
        options = self._options.get((graph_id, is_synchronised))
        if options is None:
            import onnxruntime

            options = onnxruntime.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(graph_id))
            if not is_synchronised:
                options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            self._options[graph_id, is_synchronised] = options
        return options


def open_cuda_session(model: OnnxModel, options: SessionOptions, compute_stream: int) -> OrtSession:
    """Open a session on the GPU whose runs go to the stream with this address.

    Raises ModelError when ONNX Runtime refuses the model, DeviceError when the session is not on the GPU: it
    would run on the CPU without a word (microsoft/onnxruntime#23372).
    """
    if compute_stream == 0:
        raise DeviceError("the default stream can't be the compute stream: ONNX Runtime takes 0 for not set")
    provider: dict[str, str] = {
        "device_id": "0",
        "enable_cuda_graph": "1" if options.has_graphs else "0",
        "user_compute_stream": str(compute_stream),
        # Grows by what is asked for, so that a late allocation shows and nothing is taken in advance.
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": options.conv_search,
        # 1 clears a Conv's addend outside the stream, and so outside the graph.
        "fuse_conv_bias": "0",
        "prefer_nhwc": "1" if options.prefers_nhwc else "0",
    }
    if options.memory_limit_bytes is not None:
        provider["gpu_mem_limit"] = str(options.memory_limit_bytes)
    session_options = _session_options()
    session_options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = open_session(model, session_options, providers=[(CUDA_PROVIDER, provider)])
    except ModelError as error:
        # The model is not at fault when the device is: another process, or another minute, may serve it.
        kind = classify(str(error.__cause__))
        if kind is RunFailedError:
            raise
        raise (DeviceError if kind is OutOfMemoryError else CudaFaultError)(str(error)) from error
    found = session.get_providers()
    if not found or found[0] != CUDA_PROVIDER:
        raise DeviceError(
            f"model {model.label}: ONNX Runtime could not load CUDA and would run on {', '.join(found)};"
            " a CUDA or cuDNN library is missing or too old: pip install 'headrace[gpu]', without the"
            " package onnxruntime beside it"
        )
    return OrtSession(session, "cuda", has_graphs=options.has_graphs, strays=strays_of(session))


def strays_of(session: onnxruntime.InferenceSession, provider: str = CUDA_PROVIDER) -> tuple[str, ...]:
    """Return the operators that do not run on ``provider``, as "Resize x3", in the order of their names."""
    counts: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        if subgraph.ep_name != provider:
            counts.update(node.op_type for node in subgraph.get_nodes())
    return tuple(f"{op_type} x{count}" for op_type, count in sorted(counts.items()))


def open_host_session(model: OnnxModel, *, has_graphs: bool, threads: int = 1) -> OrtSession:
    """Open a session on host addresses."""
    options = _session_options()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return OrtSession(open_session(model, options), "cpu", has_graphs=has_graphs)


def _session_options() -> onnxruntime.SessionOptions:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Every error is raised and told by us; ONNX Runtime's own copy on stderr would be the second.
    options.log_severity_level = 4
    return options
