"""One sample of every message of the wire, with all its fields set, and the smallest where that differs."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

from headrace.protocol.messages import (
    Batch,
    Cancel,
    ClassProfile,
    Color,
    Compare,
    Compared,
    Credit,
    Discover,
    Done,
    EmulatedCost,
    Encoding,
    Endpoints,
    Failed,
    Fit,
    Frame,
    FrameResult,
    Frames,
    Goodbye,
    Heartbeat,
    Hello,
    ImageInput,
    Keep,
    Limits,
    Load,
    Loaded,
    Message,
    ModelFile,
    ModelProfile,
    ModelSpec,
    NotLoaded,
    Outcome,
    Outcomes,
    Oversize,
    Ready,
    Refused,
    Reject,
    ReplayReply,
    Reply,
    Request,
    Setup,
    ShmRef,
    SizeClassSpec,
    Status,
    Subscribed,
    Telemetry,
    TensorSpec,
    Timing,
    Unload,
    Welcome,
    WorkerHello,
)

LIMITS = Limits()


def png_bytes(height: int, width: int, color_type: int = 2, depth: int = 8) -> bytes:
    """A PNG's signature and IHDR chunk: enough for everyone who does not decode it."""
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    chunk = b"IHDR" + header
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


def exif_segment(orientation: int, order: str = "<") -> bytes:
    """An APP1 segment whose one TIFF entry is the orientation."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    tiff = mark + struct.pack(f"{order}IHHHIHH", 8, 1, 0x0112, 3, 1, orientation, 0) + b"\0\0\0\0"
    body = b"Exif\0\0" + tiff
    return b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body


def jpeg_bytes(
    height: int, width: int, components: int = 3, before: bytes = b"", marker: int = 0xC0, precision: int = 8
) -> bytes:
    """A JPEG up to its frame header: enough for everyone who does not decode it."""
    body = struct.pack(">BHHB", precision, height, width, components) + bytes(3 * components)
    return b"\xff\xd8" + before + b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body


def raw_frame(stream: str = "cam-1", **changes: object) -> Frame:
    fields: dict[str, object] = {"stream": stream, "payload": b"\x01\x02\x03\x04\x05\x06", "nbytes": 6}
    fields |= {"shape": (1, 2, 3), "seq": 7, "epoch": 9}
    return Frame(**(fields | changes))  # type: ignore[arg-type]


FULL_FRAME = Frame(
    stream="site-a/cam-é",
    payload=bytes(range(24)),
    nbytes=24,
    shape=(2, 3, 1),
    dtype="float32",
    color=Color.GRAY,
    seq=2**64 - 1,
    epoch=2**63,
    model="detector:3",
    priority=9,
    ttl_ms=86_400_000,
    keep=Keep.LATEST,
    pts_ns=-(2**63),
    meta={"camera": "door", "gain": 1.5, "tags": ["a", b"\xff", None, True], "big": 2**64 - 1},
)
PNG_FRAME = Frame("cam-1", png_bytes(480, 640), 33, (480, 640, 3), encoding=Encoding.PNG, seq=1, epoch=2)
JPEG_FRAME = Frame(
    "cam-1", jpeg_bytes(480, 640), 21, (480, 640, 3), encoding=Encoding.JPEG, color=Color.BGR, seq=2, epoch=2
)
SHM_FRAME = Frame(
    "cam-2", ShmRef("arena-1", 4096, 12, 3), 12, (2, 2, 3), seq=3, epoch=2, meta={"lane": "shm"}
)
INPUTS_FRAME = Frame(
    "tensors",
    b"\0" * 20,
    20,
    (1, 4),
    dtype="float32",
    seq=4,
    epoch=2,
    inputs=(TensorSpec("x", "float32", (1, 4)), TensorSpec("mask", "uint8", (4,))),
)

MODEL = ModelSpec(
    name="detector",
    version="3",
    files=(ModelFile("detector.onnx", "ab" * 32, 12345), ModelFile("weights/part.bin", "0f" * 32, 2**40)),
    image=ImageInput(
        color=Color.BGR, channels=3, scale=0.5, mean=(0.25, 0.5, 0.75), std=(1.0, 2.0, 4.0), pad_value=114
    ),
    size_classes=(
        SizeClassSpec("small", 160, 192),
        SizeClassSpec("large", 384, 640, max_batch_size=4, fit=Fit.LETTERBOX),
    ),
    oversize=Oversize.REJECT,
    adapter="text",
    adapter_options={"threshold": 0.3, "names": ["a", "b"]},
    emulated=EmulatedCost(2.0, 0.25),
)
ENDPOINTS = Endpoints(
    boot=11,
    frames="tcp://127.0.0.1:5555",
    intake="tcp://127.0.0.1:5556",
    results="tcp://127.0.0.1:5557",
    workers="tcp://127.0.0.1:5558",
    control="ipc:///run/headrace/control",
    http="",
    host_key="host",
)
OK_OUTCOME = Outcome(
    stream="cam-1",
    epoch=5,
    seq=6,
    boot=7,
    pub_seq=8,
    status=Status.OK,
    model="detector",
    version="3",
    size_class="small",
    worker="gpu-0",
    attempt=1,
    batch_size=4,
    shape=(144, 176, 3),
    pts_ns=40_000_000,
    meta={"camera": "door"},
    timing=Timing(10, 200, 300, 4000, 4100),
    outputs={"boxes": [[1.5, 2.0, 3.0, 4.0]], "labels": ["text"]},
    tensors=(TensorSpec("scores", "float16", (1, 2)), TensorSpec("none", "float32", (0, 4))),
    payloads=(b"\x00\x3c\x00\x40", b""),
    flags=("image_truncated",),
)
REJECTED_OUTCOME = Outcome(
    stream="cam-1",
    epoch=5,
    seq=7,
    boot=7,
    pub_seq=9,
    status=Status.REJECTED,
    code="queue_full",
    message="the queue is full",
    retry_after_ms=250,
    timing=Timing(queued_us=3),
)

_CLASSES = (ClassProfile(SizeClassSpec("small", 160, 192), ((1, 2.5), (4, 6.25))),)

#: Name -> message. Every class of the wire is here at least once (a test sees to it).
SAMPLES: dict[str, Message] = {
    "frame": Frames((FULL_FRAME,)),
    "frame small": Frames((Frame("a", b"\x01", 1, (1,)),)),
    "frame png": Frames((PNG_FRAME,)),
    "frame shm": Frames((SHM_FRAME,)),
    "frame inputs": Frames((INPUTS_FRAME,)),
    "frame bundle": Frames((raw_frame(), SHM_FRAME, JPEG_FRAME)),
    "frame table": Frames(
        (
            raw_frame(meta={"n": 1}),
            raw_frame(seq=8, payload=b"\x07\x08", nbytes=2, shape=(2, 1, 1)),
            raw_frame("cam-2", seq=4, priority=5),
        )
    ),
    "frame table shm": Frames(
        (replace(SHM_FRAME, meta=None), replace(SHM_FRAME, seq=4, payload=ShmRef("arena-1", 8192, 12, 7)))
    ),
    "batch table": Batch(
        batch=6,
        model="detector",
        version="3",
        size_class="small",
        frames=(raw_frame(), raw_frame("cam-2", seq=4, epoch=2)),
    ),
    "outcome": Outcomes((OK_OUTCOME,)),
    "outcomes alike": Outcomes(
        tuple(
            Outcome(
                "cam-1",
                5,
                seq,
                7,
                seq + 3,
                Status.OK,
                model="mean",
                version="1",
                worker="w",
                attempt=1,
                batch_size=2,
                shape=(4, 4),
                timing=Timing(0, 5, 6, 7, 8 + seq),
                tensors=(TensorSpec("mean", "uint8", (1,)),),
                payloads=(bytes([seq]),),
            )
            for seq in (0, 1)
        )
    ),
    "done alike": Done(
        batch=6, results=(FrameResult(Status.OK, outputs=1), FrameResult(Status.OK, outputs=2))
    ),
    "heartbeat": Heartbeat(),
    "heartbeat probe": Heartbeat(7),
    "goodbye": Goodbye("done"),
    "refused": Refused("unknown_peer", "say hello first"),
    "discover": Discover(),
    "endpoints": ENDPOINTS,
    "hello": Hello(epoch=2**64 - 1, name="camera script", host_key="host"),
    "hello arena": Hello(epoch=2, host_key="host", arena="headrace-0123456789abcdef.arena"),
    "welcome": Welcome(
        boot=11,
        credits=64,
        heartbeat_ms=1000,
        limits=Limits(max_frame_bytes=1000),
        models=(MODEL,),
        endpoints=ENDPOINTS,
        is_shm_possible=True,
    ),
    "credit": Credit(finished=12, streams={"cam-1": 5, "cam-é": 2**64 - 1}, by_status={"ok": 11, "error": 1}),
    "reject": Reject("queue_full", "the queue is full", stream="cam-1", epoch=5, seq=6, retry_after_ms=250),
    "worker_hello": WorkerHello("gpu-0", 77, "host", "cuda:0 NVIDIA H200", "cuda", "0.1.0", pid=4711),
    "setup": Setup(boot=11, heartbeat_ms=500, limits=LIMITS, models=(MODEL,), endpoints=ENDPOINTS),
    "ready": Ready(
        worker="gpu-0",
        instance=77,
        slots=2,
        models=(
            ModelProfile(
                name="detector",
                version="3",
                classes=_CLASSES,
                inputs=(TensorSpec("images", "float32", (3, -1, -1)), TensorSpec("n", "int64", ())),
                notes=("fixed batch of 1",),
            ),
        ),
    ),
    "batch": Batch(
        batch=5,
        model="detector",
        version="3",
        size_class="small",
        frames=(raw_frame(), JPEG_FRAME, SHM_FRAME),
    ),
    "done": Done(
        batch=5,
        results=(
            FrameResult(
                Status.OK,
                outputs=[{"box": [1, 2.5, 3, 4], "score": 0.5}],
                tensors=(TensorSpec("mask", "bool", (2, 2)), TensorSpec("total", "float64", ())),
                payloads=(b"\x01\x00\x00\x01", b"\0" * 8),
                flags=("image_truncated",),
            ),
            FrameResult(Status.ERROR, code="damaged_image", message="the JPEG ends early"),
            FrameResult(Status.OK, tensors=(TensorSpec("y", "uint8", (3,)),), payloads=(b"abc",)),
        ),
        staged_us=100,
        ran_us=2000,
        total_us=2500,
    ),
    "failed": Failed(batch=5, code="batch_failed", message="the session failed"),
    "telemetry": Telemetry("gpu-0", {"gpu_busy_ratio": 0.5, "graph_replays_total/detector:3 small x4": 12.0}),
    "cancel": Cancel(batch=5),
    "load": Load(
        ModelSpec(
            "detector",
            "3-9f86d081",
            files=(ModelFile("net.onnx", "0f" * 32, 5),),
            gpu_files=(ModelFile("half.onnx", "ab" * 32, 3),),
        )
    ),
    "loaded": Loaded(ModelProfile("detector", "3-9f86d081", _CLASSES, ())),
    "not_loaded": NotLoaded("detector", "3-9f86d081", "load_failed", "the graph has no batch axis"),
    "unload": Unload("detector", "3"),
    "compare": Compare(batch=5, version="3-9f86d081"),
    "compared": Compared(batch=5, version="3-9f86d081", frames=4, agreed=3, max_abs=0.5, max_rel=0.25),
    "outcomes": Outcomes((OK_OUTCOME, REJECTED_OUTCOME)),
    "subscribed": Subscribed(boot=7, topic="site-a/"),
    "request": Request(id=3, method="replay", params={"stream": "cam-1", "first": 0, "last": 9}),
    "reply": Reply(id=3, result={"total": 4}, payloads=(b"part", b"")),
    "reply refused": Reply(id=4, code="unknown_method", message="no such method"),
    "replay_reply": ReplayReply(
        id=3, outcomes=(OK_OUTCOME, REJECTED_OUTCOME), missed=((0, 4), (6, 8)), has_more=True
    ),
}
