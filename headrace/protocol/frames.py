"""FRAME and BATCH: frames to header entries and back, with every check of a frame.

Not here: whether the broker wants the frame (models, queues, credit): that is admission's.

This is a hot path (each frame passes four times: in and out of the broker, twice), so that the
common case is straight code over ``dict.get`` and the words of a refusal are made elsewhere, when needed.
A frame that breaks a rule raises RemoteProtocolError inside; a message of frames turns that into a
``BadFrame`` in its place, a BATCH (from our own broker) lets it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol.fields import (
    I64_MAX,
    I64_MIN,
    MAX_NAME_CHARACTERS,
    bad_field,
    has_more_items,
    integer,
    missing_field,
    out_of_range,
    required_name,
    shown,
    stream_id,
    tree_map,
    u64,
)
from headrace.protocol.imageheader import read_image_shape
from headrace.protocol.messages import (
    BadFrame,
    Batch,
    Buffer,
    Color,
    Encoding,
    Frame,
    Frames,
    Keep,
    Limits,
    Payload,
    ShmRef,
    TensorSpec,
    Value,
)
from headrace.protocol.tensors import (
    ITEM_BYTES,
    MAX_TENSORS,
    read_input_spec,
    read_shape,
    tensor_bytes,
    write_spec,
)
from headrace.protocol.wire import pack, part_bytes

MAX_TTL_MS: Final = 86_400_000  # a day: a longer deadline is no deadline

_ENCODINGS: Final = {member.value: member for member in Encoding}
_COLORS: Final = {member.value: member for member in Color}
_KEEPS: Final = {member.value: member for member in Keep}

_read_ttl_ms: Final = integer(1, MAX_TTL_MS)
read_pts_ns: Final = integer(I64_MIN, I64_MAX)


# -- writing -----------------------------------------------------------------------------------------


def write_frames(message: Frames) -> tuple[dict[str, Any], list[Buffer]]:
    """Return header fields and payload parts; a single frame has its fields in the header itself.

    Raises ValueError for a BadFrame: only a decoder makes those.
    """
    payloads: list[Buffer] = []
    entries: list[dict[str, Any]] = []
    for frame in message.frames:
        if type(frame) is not Frame:
            raise ValueError("a BadFrame stands for a frame that was received: it can't be sent")
        entries.append(write_frame(frame, payloads))
    return (entries[0] if len(entries) == 1 else {"frames": entries}), payloads


def write_batch(message: Batch) -> tuple[dict[str, Any], list[Buffer]]:
    payloads: list[Buffer] = []
    fields = {
        "batch": message.batch,
        "model": message.model,
        "version": message.version,
        "size_class": message.size_class,
        "frames": [write_frame(frame, payloads) for frame in message.frames],
    }
    return fields, payloads


def write_frame(  # noqa: C901 - one branch a field, as in read_frame
    frame: Frame, payloads: list[Buffer]
) -> dict[str, Any]:
    """Return the header entry of one frame, defaults left out, and append its payload part if it has one."""
    entry: dict[str, Any] = {"stream": frame.stream}
    if frame.seq is not None:
        entry["seq"] = frame.seq
    if frame.epoch is not None:
        entry["epoch"] = frame.epoch
    if frame.model:
        entry["model"] = frame.model
    if frame.inputs:
        entry["inputs"] = [write_spec(spec) for spec in frame.inputs]
    else:
        if frame.shape:
            entry["shape"] = frame.shape
        if frame.dtype != "uint8":
            entry["dtype"] = frame.dtype
        if frame.encoding is not Encoding.RAW:
            entry["encoding"] = frame.encoding
    if frame.color is not Color.RGB:
        entry["color"] = frame.color
    if frame.priority:
        entry["priority"] = frame.priority
    if frame.ttl_ms is not None:
        entry["ttl_ms"] = frame.ttl_ms
    if frame.keep is not Keep.ALL:
        entry["keep"] = frame.keep
    if frame.pts_ns is not None:
        entry["pts_ns"] = frame.pts_ns
    if frame.meta is not None:
        entry["meta"] = frame.meta
    payload = frame.payload
    if type(payload) is ShmRef:
        entry["lane"] = "shm"
        entry["arena"] = payload.arena
        entry["offset"] = payload.offset
        entry["nbytes"] = payload.nbytes
        entry["generation"] = payload.generation
    else:
        payloads.append(payload)  # type: ignore[arg-type]  # what is no ShmRef is a Buffer
    return entry


# -- reading a message -------------------------------------------------------------------------------


def read_frames(header: dict[Any, Any], payloads: Sequence[Buffer], limits: Limits) -> Frames:
    """Read FRAME. Raises RemoteProtocolError only when the message as a whole can't be read: its parts
    don't match its entries, or a lone frame has no readable stream."""
    entries = header.get("frames")
    if entries is None:
        return Frames((_read_lone(header, payloads, limits),))
    _check_entries(entries, payloads, limits)
    frames: list[Frame | BadFrame] = []
    next_part = 0
    for entry in entries:
        part: Buffer | None = None
        if _takes_part(entry):
            part = payloads[next_part]
            next_part += 1
        try:
            frames.append(read_frame(entry, part, limits))
        except RemoteProtocolError as error:
            frames.append(bad_frame(entry, error, limits))
    return Frames(tuple(frames))


def read_batch(header: dict[Any, Any], payloads: Sequence[Buffer], limits: Limits) -> Batch:
    """Read BATCH. A bad frame fails the whole: the broker has checked them all."""
    entries = header.get("frames")
    _check_entries(entries, payloads, limits)
    frames: list[Frame] = []
    next_part = 0
    for entry in entries:  # type: ignore[union-attr]  # a list: _check_entries
        part: Buffer | None = None
        if _takes_part(entry):
            part = payloads[next_part]
            next_part += 1
        frames.append(read_frame(entry, part, limits, is_from_broker=True))
    get = header.get
    return Batch(
        batch=u64(get("batch"), "batch"),
        model=required_name(get("model"), "model"),
        version=required_name(get("version"), "version"),
        size_class=required_name(get("size_class"), "size_class"),
        frames=tuple(frames),
    )


def _read_lone(header: dict[Any, Any], payloads: Sequence[Buffer], limits: Limits) -> Frame | BadFrame:
    announced = 1 if _takes_part(header) else 0
    # A frame without any payload is the frame's fault, not the message's: it has a name to reject.
    if len(payloads) > announced:
        raise _part_count(announced, len(payloads))
    try:
        return read_frame(header, payloads[0] if payloads else None, limits)
    except RemoteProtocolError as error:
        bad = bad_frame(header, error, limits)
        if bad.stream is None:
            raise
        return bad


def _check_entries(entries: object, payloads: Sequence[Buffer], limits: Limits) -> None:
    if entries is None:
        raise missing_field("frames")
    if type(entries) is not list:
        raise bad_field("frames", "an array", entries)
    if not 1 <= len(entries) <= limits.max_frames_per_message:
        raise RemoteProtocolError(
            Code.OUT_OF_RANGE,
            f"frames must have 1 to {limits.max_frames_per_message} items (max_frames_per_message), "
            f"it has {len(entries)}",
        )
    announced = sum([_takes_part(entry) for entry in entries])
    if announced != len(payloads):
        raise _part_count(announced, len(payloads))


def _takes_part(entry: object) -> bool:
    """A frame takes the next payload part unless it says that its payload is elsewhere."""
    return type(entry) is not dict or ("data" not in entry and entry.get("lane") != "shm")


def _part_count(announced: int, found: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        Code.PART_COUNT, f"the header announces {announced} payload parts, the message has {found}"
    )


def bad_frame(entry: object, error: RemoteProtocolError, limits: Limits) -> BadFrame:
    """Keep what can be read of a bad frame, so that its rejection names it."""
    if type(entry) is not dict:
        return BadFrame(error.code, error.message)

    def read(name: str, reader: Any) -> Any:
        try:
            return reader(entry[name], name)
        except (KeyError, RemoteProtocolError):
            return None

    return BadFrame(
        code=error.code,
        message=error.message,
        stream=read("stream", stream_id),
        seq=read("seq", u64),
        epoch=read("epoch", u64),
        pts_ns=read("pts_ns", read_pts_ns),
        meta=read("meta", lambda value, _name: read_meta(value, limits)),
    )


# -- reading one frame -------------------------------------------------------------------------------


def read_frame(  # noqa: C901 - one branch a field, in the open: calls are what costs here
    entry: object, part: Buffer | None, limits: Limits, is_from_broker: bool = False
) -> Frame:
    if type(entry) is not dict:
        raise bad_field("a frame", "a map", entry)
    get = entry.get
    stream = get("stream")
    # Short ASCII ids without NUL are nearly all there are; the reader has the words for the rest.
    if type(stream) is not str or not 0 < len(stream) <= 32 or "\0" in stream:
        stream = read_stream(stream)
    seq = get("seq")
    if seq is not None and (type(seq) is not int or seq < 0):
        seq = u64(seq, "seq")
    epoch = get("epoch")
    if epoch is not None and (type(epoch) is not int or epoch < 0):
        epoch = u64(epoch, "epoch")
    priority = get("priority", 0)
    if type(priority) is not int or not 0 <= priority < limits.priority_levels:
        priority = _read_priority(priority, limits)
    ttl_ms = get("ttl_ms")
    if ttl_ms is not None:
        ttl_ms = _read_ttl_ms(ttl_ms, "ttl_ms")
    pts_ns = get("pts_ns")
    if pts_ns is not None and (type(pts_ns) is not int or pts_ns > I64_MAX):
        pts_ns = read_pts_ns(pts_ns, "pts_ns")
    meta = get("meta")
    if meta is not None:
        meta = read_meta(meta, limits)
    model = get("model", "")
    if type(model) is not str or len(model) > MAX_NAME_CHARACTERS:
        model = read_model(model)
    keep = get("keep")
    keep = Keep.ALL if keep is None else read_keep(keep)
    color = get("color")
    color = Color.RGB if color is None else read_color(color)
    encoding = get("encoding")
    encoding = Encoding.RAW if encoding is None else _read_encoding(encoding)

    payload = _read_payload(entry, part) if part is None or "lane" in entry else part
    nbytes = payload.nbytes if type(payload) is ShmRef else part_bytes(payload)  # type: ignore[arg-type]
    if not 0 < nbytes <= limits.max_frame_bytes:
        raise bad_size(nbytes, limits)
    dtype = get("dtype")
    if dtype is None:
        dtype = "uint8"
    inputs: tuple[TensorSpec, ...] = ()
    if encoding is not Encoding.RAW:
        shape = _read_image(entry, payload, encoding, limits, is_from_broker)
    elif get("inputs") is None:
        shape = read_raw_shape(get("shape"), dtype, nbytes)
    else:
        inputs = _read_inputs(entry["inputs"], nbytes)
        dtype, shape = inputs[0].dtype, inputs[0].shape
    if color is Color.GRAY:
        check_gray(encoding, shape)
    return Frame(
        stream, payload, nbytes, shape, dtype, encoding, color, seq, epoch, model, priority, ttl_ms, keep,
        pts_ns, meta, inputs,
    )  # fmt: skip  # by position, as keywords cost half a microsecond a frame


def read_stream(value: object) -> str:
    if value is None:
        raise missing_field("stream")
    return stream_id(value, "stream")


def _read_payload(entry: dict[Any, Any], part: Buffer | None) -> Payload:
    """Read a payload that is not simply the next part: ``data`` in the header, or the shm lane."""
    lane = entry.get("lane", "inline")
    if lane == "shm":
        if "data" in entry:
            raise bad_field("data", "left out on lane shm", entry["data"])
        get = entry.get
        return ShmRef(
            arena=required_name(get("arena"), "arena"),
            offset=u64(get("offset"), "offset"),
            nbytes=u64(get("nbytes"), "nbytes"),
            generation=u64(get("generation"), "generation"),
        )
    if lane != "inline" and lane is not None:
        raise bad_field("lane", "inline or shm", lane)
    if part is not None:
        return part
    if "data" not in entry:
        raise RemoteProtocolError(
            Code.EMPTY_PAYLOAD, "the frame has no payload: neither a second message part nor a field data"
        )
    data = entry["data"]
    if type(data) is str:  # the old raw format has no other type for bytes: see wire.unpack_header
        return data.encode("utf-8")
    if type(data) is not bytes and type(data) is not memoryview:
        raise bad_field("data", "bytes", data)
    return data


def read_raw_shape(value: object, dtype: object, nbytes: int) -> tuple[int, ...]:
    """Read the shape of a raw tensor and demand that shape x dtype is exactly the payload's length."""
    item_bytes = ITEM_BYTES.get(dtype) if type(dtype) is str else None
    if item_bytes is None:
        raise _bad_dtype(dtype)
    if type(value) is list and 0 < len(value) <= 8:
        expected = item_bytes
        for axis in value:
            if type(axis) is not int or axis <= 0:
                break
            expected *= axis
        else:
            if expected == nbytes:
                return tuple(value)
    if value is None:
        raise missing_field("shape")
    shape = read_shape(value, "shape")
    raise RemoteProtocolError(
        Code.SIZE_MISMATCH,
        f"shape {list(shape)} of {dtype} is {tensor_bytes(shape, dtype)} bytes, the payload has {nbytes}",  # type: ignore[arg-type]
    )


def _read_inputs(value: object, nbytes: int) -> tuple[TensorSpec, ...]:
    if type(value) is not list or not 1 <= len(value) <= MAX_TENSORS:
        raise bad_field("inputs", f"an array of 1 to {MAX_TENSORS} maps", value)
    inputs = tuple([read_input_spec(item, f"inputs[{index}]") for index, item in enumerate(value)])
    expected = sum([tensor_bytes(spec.shape, spec.dtype) for spec in inputs])
    if expected != nbytes:
        raise RemoteProtocolError(
            Code.SIZE_MISMATCH, f"the {len(inputs)} inputs are {expected} bytes, the payload has {nbytes}"
        )
    return inputs


def _read_image(
    entry: dict[Any, Any], payload: Payload, encoding: Encoding, limits: Limits, is_from_broker: bool
) -> tuple[int, ...]:
    """Return (height, width, channels) of an encoded frame, from the image's own header.

    A shape that is sent as well must name the same height and width. It is taken at its word where the
    bytes are not here (lane shm) or were read before (a BATCH): the worker's decoder compares again.
    """
    if entry.get("dtype", "uint8") not in ("uint8", None):
        raise RemoteProtocolError(
            Code.BAD_DTYPE, f"an encoded image has dtype uint8, got {shown(entry['dtype'])}"
        )
    if entry.get("inputs") is not None:
        raise bad_field("inputs", "left out with an encoded image", entry["inputs"])
    sent = None if entry.get("shape") is None else read_shape(entry["shape"], "shape")
    if sent is not None and len(sent) not in (2, 3):
        raise RemoteProtocolError(
            Code.BAD_SHAPE, f"shape of an image must be [height, width, channels], got {list(sent)}"
        )
    if type(payload) is ShmRef or (is_from_broker and sent is not None):
        if sent is None:
            raise missing_field("shape")
        shape = sent
    else:
        shape = read_image_shape(payload, encoding)  # type: ignore[arg-type]
        if sent is not None and sent[:2] != shape[:2]:
            raise RemoteProtocolError(
                Code.BAD_SHAPE, f"shape says {list(sent)}, the {encoding} image has {list(shape)}"
            )
    if shape[0] * shape[1] > limits.max_pixels:
        raise RemoteProtocolError(
            Code.IMAGE_TOO_LARGE,
            f"the image has {shape[1]}x{shape[0]} pixels, the limit is {limits.max_pixels} (max_pixels)",
        )
    return shape


def check_gray(encoding: Encoding, shape: tuple[int, ...]) -> None:
    """Gray pixels have one channel; an encoded image brings its own colour and the field is not used."""
    if encoding is Encoding.RAW and len(shape) != 2 and (len(shape) != 3 or shape[2] != 1):
        raise RemoteProtocolError(Code.BAD_COLOR, f"color gray contradicts the shape {list(shape)}")


def read_meta(value: object, limits: Limits) -> dict[str, Value]:
    if has_more_items(value, limits.max_meta_bytes):  # each has a byte; a table repeats this for every row
        raise RemoteProtocolError(
            Code.META_TOO_LARGE,
            f"meta has more values than its limit of {limits.max_meta_bytes} bytes (max_meta_bytes)",
        )
    meta = tree_map(value, "meta")
    size_bytes = len(pack(meta))
    if size_bytes > limits.max_meta_bytes:
        raise RemoteProtocolError(
            Code.META_TOO_LARGE,
            f"meta has {size_bytes} bytes, the limit is {limits.max_meta_bytes} (max_meta_bytes)",
        )
    return meta


def read_keep(value: object) -> Keep:
    keep = _KEEPS.get(value) if type(value) is str else None
    if keep is None:
        raise bad_field("keep", "all or latest", value)
    return keep


def read_color(value: object) -> Color:
    color = _COLORS.get(value) if type(value) is str else None
    if color is None:
        raise RemoteProtocolError(Code.BAD_COLOR, f"color must be rgb, bgr or gray, got {shown(value)}")
    return color


def _read_encoding(value: object) -> Encoding:
    encoding = _ENCODINGS.get(value) if type(value) is str else None
    if encoding is None:
        raise RemoteProtocolError(Code.BAD_ENCODING, f"encoding must be raw, jpeg or png, got {shown(value)}")
    return encoding


def _read_priority(value: object, limits: Limits) -> int:
    """Find the word for a priority that is no plain one; nil means left out, as everywhere."""
    if value is None:
        return 0
    if type(value) is not int:
        raise bad_field("priority", "an integer", value)
    raise out_of_range("priority", 0, limits.priority_levels - 1, value)


def read_model(value: object) -> str:
    if value is None:
        return ""
    raise bad_field("model", f"text of at most {MAX_NAME_CHARACTERS} characters", value)


def _bad_dtype(value: object) -> RemoteProtocolError:
    return RemoteProtocolError(
        Code.BAD_DTYPE, f"dtype must be one of {', '.join(ITEM_BYTES)}, got {shown(value)}"
    )


def bad_size(nbytes: int, limits: Limits) -> RemoteProtocolError:
    if nbytes == 0:
        return RemoteProtocolError(Code.EMPTY_PAYLOAD, "the payload has 0 bytes")
    return RemoteProtocolError(
        Code.FRAME_TOO_LARGE,
        f"the payload has {nbytes} bytes, the limit is {limits.max_frame_bytes} (max_frame_bytes)",
    )
