"""Staging: every pixel of a frame in its place, nothing else in the buffer, one bad frame alone."""

from __future__ import annotations

import cv2
import hr_worker
import numpy as np
import pytest
from hr_worker import batch_of, image_frame, image_plan, raw_frame, tensor_plan, tensors_frame
from numpy.typing import NDArray

from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Color, Encoding, Fit, Frame, Limits, Oversize, ShmRef
from headrace.workers import staging
from headrace.workers.engine import InputPlan
from headrace.workers.staging import BufferPool, Stager, StagingPlan, StagingResult, is_castable


def stage(plan: StagingPlan, *frames: Frame, pool: BufferPool | None = None) -> StagingResult:
    return Stager(pool or BufferPool(), Limits()).stage(batch_of(*frames), plan)


def rows_of(result: StagingResult) -> NDArray[np.generic]:
    assert result.batch is not None
    return result.batch.inputs[0].array


def codes_of(result: StagingResult) -> dict[int, str]:
    return {index: failure.code for index, failure in result.failures.items()}


RGB = hr_worker.gradient(64, 96)
SMALL = hr_worker.gradient(40, 50)


# -- placing ------------------------------------------------------------------------------------------


def test_a_frame_of_the_class_size_is_copied_as_it_is() -> None:
    result = stage(image_plan(), raw_frame(RGB))

    assert (rows_of(result)[0] == RGB).all()


@pytest.mark.parametrize(
    ("model", "sent", "shape"),
    [
        (Color.RGB, Color.RGB, (64, 96, 3)),
        (Color.BGR, Color.BGR, (64, 96, 3)),
        (Color.RGB, Color.BGR, (64, 96, 3)),
        (Color.GRAY, Color.GRAY, (64, 96)),
        (Color.GRAY, Color.GRAY, (64, 96, 1)),
        (Color.GRAY, Color.RGB, (64, 96, 3)),
        (Color.RGB, Color.RGB, (64, 96, 4)),
        (Color.RGB, Color.RGB, (96, 64, 3)),
    ],
)
def test_the_short_way_stages_what_the_long_way_does(
    monkeypatch: pytest.MonkeyPatch, model: Color, sent: Color, shape: tuple[int, ...]
) -> None:
    """A frame that is copied as bytes ends as it would through every check of images."""
    plan = image_plan(color=model, channels=1 if model is Color.GRAY else 3)
    array = np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)
    frames = [raw_frame(array, sent), raw_frame(array[::-1].copy(), sent)]
    short = stage(plan, *frames)

    monkeypatch.setattr(staging._PlainRows, "takes", lambda _self, _frame: False)
    long = stage(plan, *frames)

    assert short.rows == long.rows
    assert codes_of(short) == codes_of(long)
    assert (rows_of(short) == rows_of(long)).all()


def test_a_smaller_frame_is_padded_at_the_bottom_and_right() -> None:
    """`pad`: unscaled at the top left, the rest is the model's pad value."""
    result = stage(image_plan(pad_value=114), raw_frame(SMALL))

    row = rows_of(result)[0]
    assert (row[:40, :50] == SMALL).all()
    assert (row[40:] == 114).all()
    assert (row[:, 50:] == 114).all()
    assert result.rows[0].placement is not None
    assert not result.rows[0].placement.is_scaled


@pytest.mark.parametrize("color", [Color.RGB, Color.BGR])
def test_a_letterboxed_frame_is_scaled_in_place_and_centred(color: Color) -> None:
    """`letterbox`: bilinear, centred, border filled on both sides; colour swapped where it differs."""
    plan = image_plan(fit=Fit.LETTERBOX, color=color, pad_value=3)

    result = stage(plan, raw_frame(SMALL, Color.RGB))

    row, placement = rows_of(result)[0], result.rows[0].placement
    assert placement is not None
    assert (placement.height, placement.width, placement.top, placement.left) == (64, 80, 0, 8)
    expected = cv2.resize(SMALL, (80, 64), interpolation=cv2.INTER_LINEAR)
    assert (row[:, 8:88] == (expected if color is Color.RGB else expected[:, :, ::-1])).all()
    assert (row[:, :8] == 3).all()
    assert (row[:, 88:] == 3).all()


def test_an_oversize_frame_is_scaled_down_or_refused() -> None:
    big = raw_frame(hr_worker.gradient(200, 200))

    scaled = stage(image_plan(), big)
    refused = stage(image_plan(oversize=Oversize.REJECT), big)

    assert scaled.rows[0].placement is not None
    assert scaled.rows[0].placement.is_scaled
    assert refused.batch is None
    assert codes_of(refused) == {0: Code.OVERSIZE}


@pytest.mark.parametrize(
    ("shape", "line"), [((964, 1294), 1344), ((500, 500), 512), ((721, 1281), 1344)], ids=str
)
def test_img_08_odd_widths_reach_the_last_column(shape: tuple[int, int], line: int) -> None:
    """IMG-08: a view of a buffer with padded lines, sent as a contiguous copy, arrives pixel by pixel."""
    height, width = shape
    buffer = np.full((height, line, 3), 255, np.uint8)
    buffer[:, :width] = hr_worker.gradient(height, width)
    plan = image_plan(1024, 1344, buckets=(1,), pad_value=0)

    row = rows_of(stage(plan, raw_frame(buffer[:, :width])))[0]

    assert (row[:height, :width] == buffer[:, :width]).all()
    assert not row[:height, width:].any()


# -- channels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Color.RGB, Color.BGR])
@pytest.mark.parametrize("sent", [Color.RGB, Color.BGR])
@pytest.mark.parametrize("shape", [(64, 96), (40, 50)], ids=["exact", "padded"])
def test_colour_is_swapped_to_the_models_order(model: Color, sent: Color, shape: tuple[int, int]) -> None:
    image = hr_worker.gradient(*shape)

    row = rows_of(stage(image_plan(color=model), raw_frame(image, sent)))[0]

    expected = image if model is sent else image[:, :, ::-1]
    assert (row[: shape[0], : shape[1]] == expected).all()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (RGB[:, :, 0], np.repeat(RGB[:, :, :1], 3, 2)),
        (RGB[:, :, :1], np.repeat(RGB[:, :, :1], 3, 2)),
        (np.dstack([RGB, RGB[:, :, 0]]), RGB),
    ],
    ids=["height x width", "one channel", "alpha"],
)
@pytest.mark.parametrize("model", [Color.RGB, Color.BGR])
def test_img_05_gray_is_repeated_and_alpha_dropped(
    array: hr_worker.Pixels, expected: hr_worker.Pixels, model: Color
) -> None:
    """IMG-05: the written rule for arrays of 1, 2 and 4 channels."""
    result = stage(image_plan(color=model), raw_frame(array, Color.RGB))

    assert (rows_of(result)[0] == (expected if model is Color.RGB else expected[:, :, ::-1])).all()


@pytest.mark.parametrize(
    ("array", "color"),
    [
        (np.moveaxis(RGB, 2, 0), Color.RGB),
        (np.dstack([RGB, RGB]), Color.RGB),
        (RGB[:, :, :2], Color.RGB),
        (RGB, Color.GRAY),
        (RGB[None], Color.RGB),
    ],
    ids=["channels first", "six channels", "two channels", "gray of three channels", "four axes"],
)
def test_img_05_other_channels_are_refused_per_frame(array: hr_worker.Pixels, color: Color) -> None:
    """IMG-05: the refusal says what is expected, and the neighbour runs."""
    result = stage(image_plan(), raw_frame(array, color), raw_frame(RGB))

    assert codes_of(result) == {0: Code.WRONG_CHANNELS}
    assert "[height, width, 3]" in result.failures[0].message
    assert [row.index for row in result.rows] == [1]
    assert (rows_of(result)[0] == RGB).all()


@pytest.mark.parametrize("fit", [Fit.PAD, Fit.LETTERBOX])
@pytest.mark.parametrize("channels", [1, 2, 3, 4], ids=["one", "none", "three", "four"])
def test_a_model_of_one_channel_gets_luma(fit: Fit, channels: int) -> None:
    """BT.601 luma of colour, gray as it is, also through scaling."""
    array = {1: SMALL[:, :, :1], 2: SMALL[:, :, 0], 3: SMALL, 4: np.dstack([SMALL, SMALL[:, :, 0]])}[channels]
    plan = image_plan(channels=1, color=Color.GRAY, fit=fit)

    result = stage(plan, raw_frame(array, Color.RGB if channels >= 3 else Color.GRAY))

    gray = SMALL[:, :, 0] if channels <= 2 else cv2.cvtColor(SMALL, cv2.COLOR_RGB2GRAY)
    placement = result.rows[0].placement
    assert placement is not None
    target = rows_of(result)[0][placement.rows, placement.columns, 0]
    expected = cv2.resize(gray, (placement.width, placement.height)) if placement.is_scaled else gray
    assert np.abs(target.astype(int) - expected).max() <= 1


def test_img_07_array_and_file_give_the_same_pixels() -> None:
    """IMG-07: red is red, sent as RGB array, as BGR array, as PNG or as JPEG."""
    red = np.zeros((64, 96, 3), np.uint8)
    red[:, :, 0] = 254
    frames = (
        raw_frame(red),
        raw_frame(red[:, :, ::-1], Color.BGR),
        image_frame(hr_worker.png(red), Encoding.PNG, 64, 96),
        image_frame(hr_worker.jpeg(red), Encoding.JPEG, 64, 96),
    )

    rows = rows_of(stage(image_plan(), *frames))

    for row in rows[:4]:
        assert np.abs(row.astype(int) - red).max() <= 1


# -- faults stay with their frame -----------------------------------------------------------------------


def test_img_03_five_bad_payloads_hurt_no_neighbour() -> None:
    """IMG-03: five errors, three results, in one batch."""
    whole = hr_worker.jpeg(RGB)
    payloads = [b"", b"\xff", b"hello", hr_worker.png(RGB), b"<html>not found</html>"]
    good = image_frame(whole, Encoding.JPEG, 64, 96)
    bad = [image_frame(data, Encoding.JPEG, 64, 96) for data in payloads]

    result = stage(image_plan(), bad[0], good, bad[1], bad[2], good, bad[3], bad[4], good)

    assert codes_of(result) == {
        0: Code.EMPTY_PAYLOAD,
        2: Code.BAD_IMAGE,
        3: Code.BAD_IMAGE,
        5: Code.BAD_ENCODING,
        6: Code.BAD_IMAGE,
    }
    assert [row.index for row in result.rows] == [1, 4, 7]
    assert result.batch is not None
    assert (result.batch.count, result.batch.bucket) == (3, 8)
    for row in rows_of(result)[:3]:
        assert np.abs(row.astype(int) - RGB).mean() < 3


def test_a_frame_in_shared_memory_that_is_not_read_here_is_an_error_of_its_own() -> None:
    frame = Frame("cam-1", ShmRef("arena", 0, 12, 1), 12, (2, 2, 3))

    result = stage(image_plan(), frame, raw_frame(RGB))

    assert codes_of(result) == {0: Code.STALE_SLOT}


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (Frame("cam-1", bytes(11), 11, (2, 2, 3)), Code.SIZE_MISMATCH),
        (raw_frame(RGB.astype(np.float32)), Code.WRONG_DTYPE),
        (Frame("cam-1", bytes(12), 12, (2, 2, 3), dtype="object"), Code.BAD_DTYPE),
        (Frame("cam-1", bytes(12), 12, (2, 2, 3), dtype="nonsense"), Code.BAD_DTYPE),
    ],
    ids=["lying shape", "float frame", "object", "no dtype"],
)
def test_what_the_broker_should_have_refused_is_refused_here_too(frame: Frame, code: Code) -> None:
    """A worker trusts no peer: the checks that guard memory are made again."""
    assert codes_of(stage(image_plan(), frame, raw_frame(RGB))) == {0: code}


def test_a_batch_without_a_good_frame_needs_no_run() -> None:
    pool = BufferPool()

    result = stage(image_plan(), Frame("cam-1", b"x", 1, (2, 2, 3)), pool=pool)

    assert result.batch is None
    assert pool.idle_bytes > 0


def test_a_batch_above_every_bucket_fails_as_a_whole() -> None:
    with pytest.raises(InvalidFrameError, match="largest of 2"):
        stage(image_plan(buckets=(1, 2)), *[raw_frame(RGB)] * 3)


# -- buffers ------------------------------------------------------------------------------------------


def test_img_01_a_reused_buffer_shows_nothing_of_the_batch_before() -> None:
    """IMG-01: after a bright batch, padding rows are zero and borders are the pad value."""
    pool, plan = BufferPool(), image_plan(pad_value=7)
    bright = raw_frame(np.full((64, 96, 3), 255, np.uint8))
    first = stage(plan, *[bright] * 4, pool=pool)
    assert first.batch is not None
    pool.give_back(first.batch)
    bad = image_frame(hr_worker.jpeg(RGB)[:900], Encoding.JPEG, 64, 96)

    second = stage(plan, raw_frame(SMALL), bad, bad, pool=pool)

    assert rows_of(second) is rows_of(first)
    row = rows_of(second)[0]
    assert (row[:40, :50] == SMALL).all()
    assert (row[40:] == 7).all()
    assert (row[:, 50:] == 7).all()
    assert not rows_of(second)[1:].any()


def test_the_pool_keeps_no_more_than_its_bound() -> None:
    pool, plan = BufferPool(max_idle_bytes=64 * 96 * 3), image_plan()
    results = [stage(plan, raw_frame(RGB), pool=pool) for _ in range(3)]

    for result in results:
        assert result.batch is not None
        pool.give_back(result.batch)

    assert pool.idle_bytes == 64 * 96 * 3
    pool.clear()
    assert pool.idle_bytes == 0


def test_staging_copies_a_raw_frame_once_and_never_keeps_it() -> None:
    """The payload is a view of a message part: the buffer must not refer to it."""
    data = bytearray(RGB.tobytes())
    frame = Frame("cam-1", data, len(data), RGB.shape)

    rows = rows_of(stage(image_plan(), frame))
    data[:] = bytes(len(data))

    assert (rows[0] == RGB).all()


# -- tensors ------------------------------------------------------------------------------------------

VECTOR = InputPlan("x", "float32", (4,), is_image=False)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16", "float32", "float64"])
def test_ort_10_a_tensor_is_cast_to_the_models_dtype(dtype: str) -> None:
    """ORT-10: safe casts, and floats to narrower floats."""
    result = stage(tensor_plan(VECTOR), raw_frame(np.array([0, 1, 2, 250 % 100], dtype)))

    assert rows_of(result).dtype == np.float32
    assert rows_of(result)[0].tolist() == [0, 1, 2, 50]


@pytest.mark.parametrize(
    ("source", "target", "is_allowed"),
    [
        ("uint8", "float32", True), ("float64", "float32", True), ("float32", "float16", True),
        ("int32", "int64", True), ("uint8", "uint8", True), ("int64", "int32", False),
        ("int32", "float32", False), ("float32", "uint8", False), ("int8", "uint8", False),
    ],
)  # fmt: skip
def test_the_casting_rule(source: str, target: str, is_allowed: bool) -> None:
    assert is_castable(np.dtype(source), np.dtype(target)) is is_allowed


@pytest.mark.parametrize(
    ("array", "code"),
    [
        (np.zeros(4, np.int64), Code.WRONG_DTYPE),
        (np.zeros(5, np.float32), Code.WRONG_SHAPE),
        (np.zeros((1, 4), np.float32), Code.WRONG_SHAPE),
    ],
    ids=["int64", "too long", "batch axis"],
)
def test_a_tensor_of_another_kind_is_refused(array: NDArray[np.generic], code: Code) -> None:
    assert codes_of(stage(tensor_plan(VECTOR), raw_frame(array))) == {0: code}


def test_pay_12_tensors_are_right_at_every_offset_of_a_message() -> None:
    """PAY-12: a payload may start anywhere; numpy must not be handed a misaligned promise."""
    values = np.arange(4, dtype=np.float64)
    for offset in range(64):
        part = memoryview(bytes(offset) + values.tobytes())[offset:]
        frame = Frame("cam-1", part, len(part), (4,), dtype="float64")

        assert rows_of(stage(tensor_plan(VECTOR), frame))[0].tolist() == [0, 1, 2, 3]


TWO = (
    InputPlan("pixels", "float32", (2, 2), is_image=False),
    InputPlan("size", "int64", (2,), is_image=False),
)


def test_several_inputs_are_staged_by_name_in_any_order() -> None:
    size, pixels = np.array([4, 5], np.int64), np.arange(4, dtype=np.float32).reshape(2, 2)

    result = stage(tensor_plan(*TWO), tensors_frame({"size": size, "pixels": pixels}))

    assert result.batch is not None
    assert [each.name for each in result.batch.inputs] == ["pixels", "size"]
    assert (result.batch.inputs[0].array[0] == pixels).all()
    assert (result.batch.inputs[1].array[0] == size).all()


@pytest.mark.parametrize(
    "frame",
    [
        tensors_frame({"pixels": np.zeros((2, 2), np.float32)}),
        tensors_frame({"pixels": np.zeros((2, 2), np.float32), "scale": np.zeros(2, np.int64)}),
        tensors_frame(
            {"pixels": np.zeros((2, 2), np.float32), "size": np.zeros(2, np.int64), "more": np.zeros(1)}
        ),
        raw_frame(np.zeros((2, 2), np.float32)),
    ],
    ids=["missing", "renamed", "extra", "one unnamed"],
)
def test_ort_10_wrong_inputs_are_refused_with_what_is_expected(frame: Frame) -> None:
    """ORT-10: the refusal lists the expected names, dtypes and shapes."""
    result = stage(tensor_plan(*TWO), frame)

    assert codes_of(result) == {0: Code.WRONG_INPUTS}
    assert "pixels: float32 [2, 2], size: int64 [2]" in result.failures[0].message


def test_inputs_that_do_not_fill_the_payload_are_refused() -> None:
    frame = tensors_frame({"pixels": np.zeros((2, 2), np.float32), "size": np.zeros(2, np.int64)})
    longer = Frame("cam-1", bytes(frame.payload) + b"x", frame.nbytes + 1, (), inputs=frame.inputs)  # type: ignore[arg-type]

    assert codes_of(stage(tensor_plan(*TWO), longer)) == {0: Code.SIZE_MISMATCH}


def test_an_encoded_image_for_a_tensor_model_is_refused() -> None:
    frame = image_frame(hr_worker.png(RGB), Encoding.PNG, 64, 96)

    assert codes_of(stage(tensor_plan(VECTOR), frame)) == {0: Code.WRONG_INPUTS}


def test_dynamic_axes_take_the_shape_of_the_first_frame() -> None:
    """A buffer of such a batch fits no other and is not pooled; a frame of another shape is refused."""
    plan = tensor_plan(InputPlan("x", "float32", (-1, 2), is_image=False))

    result = stage(plan, raw_frame(np.ones((3, 2), np.float32)), raw_frame(np.ones((4, 2), np.float32)))

    assert rows_of(result).shape == (2, 3, 2)
    assert codes_of(result) == {1: Code.WRONG_SHAPE}
    assert not result.is_pooled
