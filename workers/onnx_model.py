"""Read an ONNX file and describe it: inputs, outputs, versions, external weights; open sessions on it.

Everything a worker or the command line knows of a model comes from the file's own metadata, read here.
Not here: the uint8 front end (front_end.py), running (the engines).

A file that can't be served raises ModelError with the version found and the highest supported, whatever
the working directory: external weights are looked up beside the graph, or by the names the graph uses, and
handed to ONNX Runtime as memory maps, because its own look-up depends on where the process stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import DeviceError, ModelError

if TYPE_CHECKING:
    import onnx
    import onnxruntime

#: Stands for a dynamic axis in ``OnnxTensor.shape``.
DYNAMIC = -1

#: What a tensor model may take and give. The other ONNX types (strings, bfloat16, float8, int4, complex) have
#: no numpy dtype that our wire carries.
_NUMPY_NAMES = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT16": "float16",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """One graph input or output. ``shape`` has DYNAMIC for every axis that the file leaves open, and is
    None where the file does not even give the rank."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """One ONNX graph with what its own metadata says. ``label`` names the file in errors.

    Invariant: ``inputs`` holds what a caller must feed; initializers that old files list as inputs are not
    among them. ``weights`` maps each external location, as the graph writes it, to a local file.
    """

    label: str
    proto: onnx.ModelProto
    inputs: tuple[OnnxTensor, ...]
    outputs: tuple[OnnxTensor, ...]
    ir_version: int
    opset: int
    weights: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SupportedVersions:
    """The newest versions that the installed ONNX Runtime reads."""

    runtime: str
    ir_version: int
    opset: int


def read_model(path: str, weights: dict[str, str] | None = None, label: str = "") -> OnnxModel:
    """Read the graph at ``path``; its weights are mapped later, by ``open_session``.

    ``weights`` maps external locations (as the graph writes them, forward slashes) to local files; those
    it lacks are looked for beside the graph. ``label`` names the model in errors (default: the path).
    Raises ModelError for a file that is no ONNX model, is too new, or lacks its weights.
    """
    import onnx
    from google.protobuf.message import DecodeError

    label = label or path
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ModelError(f"model {label}: can't read {path}: {error.strerror}") from error
    if not content:
        raise ModelError(f"model {label}: the file is empty (0 bytes): an ONNX model was expected")
    try:
        proto = onnx.load_model_from_string(content)
    except DecodeError as error:
        raise ModelError(f"model {label}: not an ONNX model ({_looks_like(content)})") from error
    if not proto.ir_version or not proto.graph.node:
        raise ModelError(f"model {label}: not an ONNX model: no graph in it ({_looks_like(content)})")
    opset = _opset(proto)
    _check_versions(label, proto.ir_version, opset)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    return OnnxModel(
        label=label,
        proto=proto,
        inputs=tuple(_tensor(label, i) for i in proto.graph.input if i.name not in initializers),
        outputs=tuple(_tensor(label, o) for o in proto.graph.output),
        ir_version=proto.ir_version,
        opset=opset,
        weights=_find_weights(label, proto, Path(path), weights or {}),
    )


def open_session(
    model: OnnxModel,
    options: onnxruntime.SessionOptions,
    providers: Sequence[str | tuple[str, dict[str, str]]] = ("CPUExecutionProvider",),
) -> onnxruntime.InferenceSession:
    """Open a session on a model, on the CPU unless other ``providers`` are named.

    Raises ModelError when ONNX Runtime refuses it. ONNX Runtime falls back to the CPU in silence when it
    can't load a provider: whoever asks for another one looks at ``get_providers`` afterwards."""
    import onnxruntime

    if model.weights:
        # ONNX Runtime copies what it keeps while the session is made; the maps may go afterwards.
        maps = [np.memmap(path, dtype=np.uint8, mode="r") for path in model.weights.values()]
        options.add_external_initializers_from_files_in_memory(
            list(model.weights), maps, [weights.nbytes for weights in maps]
        )
    try:
        return onnxruntime.InferenceSession(
            model.proto.SerializeToString(), options, providers=list(providers), enable_fallback=0
        )
    except Exception as error:  # ONNX Runtime has no public root of its error classes
        raise ModelError(
            f"model {model.label}: ONNX Runtime {onnxruntime.__version__} refuses it"
            f" (IR version {model.ir_version}, opset {model.opset}): {first_line(error)}"
        ) from error


@lru_cache(maxsize=1)
def supported_versions() -> SupportedVersions:
    """Ask the installed ONNX Runtime for the newest IR version and opset it reads.

    There is no call for it, so a one-node model of an absurd version is offered and the limit read from
    the refusal. Where the wording is not the known one, the limits of the onnx package stand in.
    """
    import onnx

    try:
        import onnxruntime
    except ImportError as error:
        raise DeviceError(
            "ONNX Runtime is not installed: pip install 'headrace[cpu]' (or 'headrace[gpu]')"
        ) from error

    ir_text, opset_text = _refusal(ir_version=9999, opset=17), _refusal(ir_version=8, opset=9999)
    ir_found = re.search(r"max supported IR version: (\d+)", ir_text)
    opset_found = re.search(r"official support for domain ai\.onnx is till opset (\d+)", opset_text)
    return SupportedVersions(
        onnxruntime.__version__,
        int(ir_found.group(1)) if ir_found else int(onnx.IR_VERSION),
        int(opset_found.group(1)) if opset_found else onnx.defs.onnx_opset_version(),
    )


def first_line(error: BaseException, limit: int = 300) -> str:
    """Return the first line of an error's text, cut at ``limit`` characters: enough for a one-line report."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:limit]


def _refusal(*, ir_version: int, opset: int) -> str:
    import onnxruntime
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "probe",
        [value("x", TensorProto.FLOAT, [1])],
        [value("y", TensorProto.FLOAT, [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the refusal is wanted: nothing of it belongs on stderr
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - ONNX Runtime has no public root of its error classes
        return str(error)
    return ""


def _check_versions(label: str, ir_version: int, opset: int) -> None:
    supported = supported_versions()
    if ir_version > supported.ir_version:
        raise ModelError(
            f"model {label}: IR version {ir_version} is newer than ONNX Runtime {supported.runtime} reads:"
            f" {supported.ir_version} is the highest supported"
        )
    if opset > supported.opset:
        raise ModelError(
            f"model {label}: opset {opset} is newer than ONNX Runtime {supported.runtime} reads:"
            f" {supported.opset} is the highest supported"
        )


def _opset(proto: onnx.ModelProto) -> int:
    versions = [int(entry.version) for entry in proto.opset_import if entry.domain in ("", "ai.onnx")]
    return max(versions, default=1)


def _looks_like(content: bytes) -> str:
    head = content[:64]
    is_text = all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head)
    return f"it is a text of {len(content)} bytes" if is_text else f"{len(content)} bytes"


def _tensor(label: str, info: onnx.ValueInfoProto) -> OnnxTensor:
    import onnx

    if not info.type.HasField("tensor_type"):
        raise ModelError(
            f"model {label}: {info.name} is a sequence, map or optional: only tensors can be served"
        )
    kind = onnx.TensorProto.DataType.Name(info.type.tensor_type.elem_type)
    if kind not in _NUMPY_NAMES:
        raise ModelError(
            f"model {label}: {info.name} has element type {kind}: supported are {', '.join(_NUMPY_NAMES)}"
        )
    shape: tuple[int, ...] | None = None
    if info.type.tensor_type.HasField("shape"):
        shape = tuple(_axis(dimension) for dimension in info.type.tensor_type.shape.dim)
    return OnnxTensor(info.name, _NUMPY_NAMES[kind], shape)


def _axis(dimension: onnx.TensorShapeProto.Dimension) -> int:
    # Some exporters write 0 or -1 for "any".
    return int(dimension.dim_value) if dimension.dim_value > 0 else DYNAMIC


def _find_weights(label: str, proto: onnx.ModelProto, path: Path, given: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for location in sorted(set(_external_locations(proto.graph))):
        relative = PurePosixPath(location.replace("\\", "/"))
        if relative.is_absolute() or ".." in relative.parts:
            raise ModelError(f"model {label}: external weights {location!r} lie outside the model's folder")
        file = Path(given.get(location) or given.get(str(relative)) or path.parent / relative)
        if not file.is_file():
            raise ModelError(f"model {label}: the file with its external weights is missing: {location}")
        if not file.stat().st_size:
            raise ModelError(f"model {label}: the file with its external weights is empty: {location}")
        found[location] = str(file)
    return found


def _external_locations(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the location of every external tensor of a graph and of the graphs in its nodes."""
    tensors = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            tensors += [attribute.t, *attribute.tensors]
            for inner in (attribute.g, *attribute.graphs):
                yield from _external_locations(inner)
    for tensor in tensors:
        for entry in tensor.external_data:
            if entry.key == "location":
                yield entry.value
