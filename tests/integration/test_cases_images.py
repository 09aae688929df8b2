"""Field cases of images, end to end: what a picture becomes between a producer and a model's output.

One broker, one real CPU worker. The model ``pixels`` gives back every pixel as the model saw it; ``mean``
(the default) the mean of each channel. The cases' ids are those of the field cases that the project collects.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hr_models
import hr_plant as hp
import hr_worker
import numpy as np
import psutil
import pytest
from hr_clients import wait_for
from PIL import Image, ImageOps

import headrace
from headrace import Client, Producer
from headrace.errors import Code
from headrace.protocol.messages import Color, Encoding, Frame, ImageInput, Outcome, SizeClassSpec, Status

PAD = 77
SMALL = SizeClassSpec("small", 48, 64, max_batch_size=8)
LARGE = SizeClassSpec("large", 96, 136, max_batch_size=8)


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hp.Plant]:
    folder: Path = tmp_path_factory.mktemp("images")
    mean = hp.onnx_model(folder, hr_models.mean_color(), SMALL, LARGE, name="mean")
    pixels = hp.onnx_model(
        folder, hr_models.pixels(), SMALL, LARGE, name="pixels", image=ImageInput(pad_value=PAD)
    )
    with hp.running_plant(folder, mean, pixels, core={"stream_stale_ms": 300}) as running:
        yield running


@pytest.fixture(scope="module")
def client(plant: hp.Plant) -> Iterator[Client]:
    with Client(plant.endpoints.frames) as made:
        yield made


def seen(outcome: Outcome) -> np.ndarray:
    """Return the pixels that the model saw, [height, width, 3] of the class."""
    return np.moveaxis(headrace.tensors_of(headrace.raise_for_status(outcome))["pixels"], 0, -1)


def assert_seen(outcome: Outcome, image: np.ndarray) -> None:
    """The model saw exactly this image, and padding around it."""
    got = seen(outcome)
    height, width = image.shape[:2]
    assert np.array_equal(got[:height, :width], image)
    assert (got[height:] == PAD).all()
    assert (got[:, width:] == PAD).all()


def file_frame(data: bytes, encoding: Encoding = Encoding.JPEG) -> Frame:
    """A frame whose size stands in its file alone, as a script sends it."""
    return Frame("cam", data, len(data), (), encoding=encoding)


def test_half_a_jpeg_never_shows_another_pictures_pixels(plant: hp.Plant) -> None:
    """IMG-01: bright pictures and one with its second half zeroed, again and again in the same buffers."""
    bright = hr_worker.jpeg(hp.solid(250, 250, 250))
    whole = hr_worker.jpeg(hr_worker.gradient(48, 64))
    halved = whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2 - 2) + whole[-2:]

    for _ in range(15):
        outcomes = plant.outcomes(*[file_frame(bright)] * 3, file_frame(halved), *[file_frame(bright)] * 4)

        assert [outcome.code for outcome in outcomes] == ["", "", "", Code.DAMAGED_IMAGE, "", "", "", ""]
        assert outcomes[3].payloads == ()
        assert hp.mean(outcomes[4]) == [250] * 3


def test_a_cut_jpeg_is_damaged_and_one_without_its_end_marker_is_flagged(plant: hp.Plant) -> None:
    """IMG-02: cut at 90 %, 50 % and 10 %, and by its last two bytes."""
    whole = hr_worker.jpeg(hr_worker.gradient(96, 128))
    cuts = [whole[: len(whole) * percent // 100] for percent in (90, 50)] + [whole[:-2]]
    # A tenth of so small a file holds no frame header: the broker has no size to go by.
    headless = whole[: len(whole) // 10]

    outcomes = plant.outcomes(*(file_frame(cut) for cut in cuts))
    with Client(plant.endpoints.frames) as client:
        cut_at_ten = client.infer(headless)

    assert [outcome.code for outcome in outcomes] == [Code.DAMAGED_IMAGE, Code.DAMAGED_IMAGE, ""]
    assert outcomes[2].flags == ("image_truncated",)
    assert cut_at_ten.code in {Code.DAMAGED_IMAGE, Code.BAD_IMAGE}
    assert cut_at_ten.message


def test_payloads_that_are_no_images_end_alone(plant: hp.Plant) -> None:
    """IMG-03: five of them among three good frames: five errors, three results in one batch."""
    png = hr_worker.png(hp.solid(1, 2, 3))
    good = file_frame(hr_worker.jpeg(hp.solid(90, 90, 90)))
    odd = [b"", b"\x01", b"just text", png, b"<html><body>404</body></html>"]

    outcomes = plant.outcomes(good, *(file_frame(data) for data in odd[:3]), good,
                              *(file_frame(data) for data in odd[3:]), good)  # fmt: skip

    assert [outcome.code for outcome in outcomes] == [
        "", Code.EMPTY_PAYLOAD, Code.BAD_IMAGE, Code.BAD_IMAGE, "", Code.BAD_ENCODING, Code.BAD_IMAGE, "",
    ]  # fmt: skip
    for outcome in (outcomes[0], outcomes[4], outcomes[7]):
        assert hp.mean(outcome) == [90] * 3
        assert outcome.batch_size == 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_camera_was(client: Client, orientation: int) -> None:
    """IMG-04: a red bar at one edge stands where every viewer shows it, and the outcome's size agrees."""
    stored = np.zeros((32, 48, 3), np.uint8)
    stored[:, :8] = (250, 0, 0)
    data = hr_worker.jpeg_with_orientation(stored, orientation)
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Image.fromarray(stored)
    picture.getexif().update(exif)
    shown = np.asarray(ImageOps.exif_transpose(picture))

    outcome = client.infer(data, model="pixels")

    height, width = shown.shape[:2]
    assert outcome.shape[:2] == (height, width)
    assert np.abs(seen(outcome)[:height, :width] - shown).max() <= 60  # JPEG blurs the bar's edge
    assert (seen(outcome)[:height, :width] - shown).mean() < 1


def test_odd_channels_are_converted_by_the_written_rule_or_refused_alone(plant: hp.Plant) -> None:
    """IMG-05: files and arrays of other channels in one message."""
    gray, rgb = Image.new("L", (64, 48), 90), Image.new("RGB", (64, 48), (200, 100, 50))
    half_clear = Image.new("L", (64, 48), 128)
    files = {
        "rgba": hr_worker.pil_bytes(Image.merge("RGBA", (*rgb.split(), half_clear)), "PNG"),
        "gray": hr_worker.pil_bytes(gray, "PNG"),
        "gray and alpha": hr_worker.pil_bytes(Image.merge("LA", (gray, half_clear)), "PNG"),
        "palette": hr_worker.pil_bytes(rgb.convert("P", palette=Image.Palette.ADAPTIVE), "PNG"),
    }
    cmyk = hr_worker.pil_bytes(rgb.convert("CMYK"), "JPEG", quality=95)
    arrays = [np.full((48, 64), 9, np.uint8), np.full((48, 64, 1), 9, np.uint8)]
    with_alpha = np.dstack([hp.solid(200, 100, 50), np.full((48, 64), 128, np.uint8)])
    frames = [file_frame(data, Encoding.PNG) for data in files.values()]
    frames += [file_frame(cmyk), *(hr_worker.raw_frame(array) for array in arrays)]
    frames += [hr_worker.raw_frame(with_alpha), hr_worker.raw_frame(np.zeros((3, 48, 64), np.uint8))]

    outcomes = plant.outcomes(*frames)

    color = [200, 100, 50]
    means = [hp.mean(outcome) for outcome in outcomes[:-1]]
    assert means[:4] == [color, [90] * 3, [90] * 3, color]
    assert means[4] == pytest.approx(color, abs=6)  # JPEG, and a colour space that is not exact
    assert means[5:] == [[9] * 3, [9] * 3, color]
    assert outcomes[-1].code == Code.WRONG_CHANNELS
    assert "expected 1, 3 or 4" in outcomes[-1].message


def test_a_small_file_of_a_huge_image_is_refused_from_its_header(tmp_path: Path) -> None:
    """IMG-06: twenty of 19000x19000 and 65500x65500 at once: no memory is taken for them anywhere."""
    start = hr_worker.jpeg(hp.solid(1, 1, 1))
    size = start.index(b"\xff\xc0") + 5
    jpeg = start[:size] + (65_500).to_bytes(2, "big") * 2 + start[size + 4 :]
    png = hr_worker.png_header_only(19_000, 19_000, bytes(44_000))
    huge = [file_frame(png, Encoding.PNG), file_frame(jpeg)] * 10
    model = hp.onnx_model(tmp_path, hr_models.mean_color())
    with hp.open_plant(model) as plant, hp.ProcessWorker(plant.endpoints, tmp_path) as worker:
        plant.wait_for_workers()
        plant.outcomes(hr_worker.raw_frame(hp.solid(1, 2, 3)))
        processes = [psutil.Process(), psutil.Process(worker.pid)]
        before = [process.memory_info().rss for process in processes]

        outcomes = plant.outcomes(*huge)
        (after_them,) = plant.outcomes(hr_worker.raw_frame(hp.solid(1, 2, 3)))

        grown = [p.memory_info().rss - was for p, was in zip(processes, before, strict=True)]
    assert {outcome.code for outcome in outcomes} == {Code.IMAGE_TOO_LARGE}
    assert hp.mean(after_them) == [1, 2, 3]
    assert max(grown) < 50 * 1024 * 1024


def test_an_unknown_channel_order_is_refused(plant: hp.Plant, client: Client) -> None:
    """IMG-07: red stays red as array and as JPEG, declared either way; an order that is none is refused."""
    red = hp.solid(254, 0, 0)

    outcomes = [
        client.infer(red),
        client.infer(red[:, :, ::-1], color="bgr"),
        client.infer(hr_worker.jpeg(red)),
        client.infer(hr_worker.png(red), color="bgr"),  # a file brings its own order
    ]
    (refused,) = plant.outcomes_of_altered(hr_worker.raw_frame(red, color=Color.BGR), b"\xa3bgr", b"\xa3grb")

    assert [hp.mean(outcome) for outcome in outcomes] == [[254, 0, 0]] * 4
    assert refused.code == Code.BAD_COLOR


@pytest.mark.parametrize(
    ("height", "width", "line"), [(96, 129, 134), (50, 50, 51), (72, 128, 134)], ids=["129", "50", "128"]
)
def test_the_padding_of_a_line_never_reaches_the_model(
    client: Client, height: int, width: int, line: int
) -> None:
    """IMG-08: views of buffers with longer lines; the rest of each line is 255 and must not show."""
    buffer = np.full((height, line, 3), 255, np.uint8)
    view = buffer[:, :width]
    view[:] = hr_worker.gradient(height, width) // 2

    outcome = client.infer(view, model="pixels")

    assert_seen(outcome, view)
    assert seen(outcome)[:height, :width].max() < 128


@pytest.mark.parametrize(
    "cut",
    [
        lambda frame: frame[10:46, 10:60],
        lambda frame: frame[:, ::-1],
        lambda frame: frame.transpose(1, 0, 2)[:, :40],
        np.asfortranarray,
        lambda frame: frame[::2],
    ],
    ids=["crop", "mirrored", "transposed", "fortran", "every-other-line"],
)
def test_the_model_sees_the_pixels_of_a_view(client: Client, cut: object) -> None:
    """PAY-01: through the whole path, from the user's array to the model's input."""
    view = cut(hr_worker.gradient(48, 64))  # type: ignore[operator]

    assert_seen(client.infer(view, model="pixels"), view)


def test_a_memoryview_reaches_the_model_whole(client: Client) -> None:
    """PAY-02: a memoryview of an array and ``array.data`` are the array."""
    frame = hr_worker.gradient(48, 64)

    for given in (memoryview(frame), frame.data):
        assert_seen(client.infer(given, model="pixels"), frame)


def test_a_stream_changes_its_size_after_a_silence(plant: hp.Plant) -> None:
    """VID-03: small, silence, large, small again: each in its own class; another stream never waits."""
    small, large = hp.solid(10, 20, 30, 40, 60), hp.solid(40, 50, 60, 90, 130)
    with Producer(plant.endpoints.frames) as producer:

        def push(image: np.ndarray, first: int) -> list[Outcome]:
            for number in range(5):
                producer.push(image, stream="s1", seq=first + number)
                producer.push(small, stream="s2")
            producer.flush(10)
            both = [("s1", first + n) for n in range(5)] + [("s2", first + n) for n in range(5)]
            return plant.collect(*both, epoch=producer.epoch)

        found = push(small, 0)
        wait_for(lambda: plant.status()["streams"]["s1"]["is_stale"])
        found += push(large, 5) + push(small, 10)

    assert {outcome.status for outcome in found} == {Status.OK}
    of_s1 = [outcome for outcome in found if outcome.stream == "s1"]
    assert [o.size_class for o in of_s1] == ["small"] * 5 + ["large"] * 5 + ["small"] * 5
    assert [o.shape[:2] for o in of_s1] == [(40, 60)] * 5 + [(90, 130)] * 5 + [(40, 60)] * 5
    waits_us = [o.timing.published_us or 0 for o in found if o.stream == "s2"]
    assert max(waits_us) < 1_000_000
    assert plant.status()["workers_lost"] == 0
