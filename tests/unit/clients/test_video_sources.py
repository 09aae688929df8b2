"""Sources: real clips, times, sizes, rotation, padding, damage, reconnecting, errors."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import subprocess
import sys
import threading

import av
import cv2
import hr_video
import numpy as np
import pytest

from headrace.clients.video.containers import ContainerSource, redact
from headrace.clients.video.newest import NewestFrames
from headrace.clients.video.sources import SourceError, SourceOptions, natural_key, open_source

MS = hr_video.MS


@pytest.mark.parametrize(
    ("name", "count", "shape", "last_ms"),
    [
        ("carphone_pristine", 120, (144, 176, 3), 3970.6),
        ("bikes", 250, (272, 640, 3), 9960.0),
        ("bigbuckbunny", 132, (720, 1280, 3), 5240.0),
    ],
)
def test_a_real_clip_is_read_whole(name, count, shape, last_ms):
    source = open_source(str(hr_video.clip(name)))

    frames = list(source.frames())

    assert len(frames) == source.counts.frame_count == count
    assert frames[0].image.shape == shape
    assert frames[0].image.dtype == np.uint8
    assert frames[-1].pts_ns == pytest.approx(last_ms * MS, abs=0.1 * MS)
    assert source.counts.damaged_count == 0
    assert not source.is_live


def test_times_are_those_of_the_container(tmp_path):
    """VID-05: a varying frame rate comes out exactly as written."""
    pts_ms = [0, 33, 66, 500, 533, 10_000]
    path = hr_video.write_lossless(tmp_path / "v.mkv", [hr_video.noise(32, 48, n) for n in range(6)], pts_ms)

    assert [f.pts_ns for f in open_source(str(path)).frames()] == [pts * MS for pts in pts_ms]


@pytest.mark.parametrize("size", [(333, 501), (964, 1294), (500, 500), (721, 1281), (16, 17)])
def test_line_padding_never_reaches_the_image(tmp_path, size):
    """IMG-08: widths that don't fit the decoder's alignment come out whole, last column included."""
    image = hr_video.noise(*size)
    path = hr_video.write_lossless(tmp_path / "v.mkv", [image], [0])

    (frame,) = open_source(str(path)).frames()

    assert np.array_equal(frame.image, image)
    assert frame.image.flags.c_contiguous


@pytest.mark.parametrize(("rotation", "turns"), [(0, 0), (90, 1), (-90, 3), (180, 2)])
def test_rotation_in_the_file_is_applied(tmp_path, rotation, turns):
    """A phone held upright: the file says how to turn the stored picture."""
    image = hr_video.noise(32, 48)
    path = hr_video.write_lossless(tmp_path / "v.mov", [image], [0], rotation=rotation)

    (frame,) = open_source(str(path)).frames()

    assert np.array_equal(frame.image, np.rot90(image, turns))


def test_the_size_may_change_in_mid_stream(tmp_path):
    """VID-03: each frame has the size it was encoded with."""
    chunks = b""
    for size in ((64, 96), (128, 160), (64, 96)):
        with av.open(str(tmp_path / "piece.ts"), "w", format="mpegts") as out:
            stream = out.add_stream("mpeg4", rate=25)
            stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
            for number in range(3):
                frame = av.VideoFrame.from_ndarray(hr_video.noise(*size, number), "rgb24")
                frame.pts = number
                out.mux(stream.encode(frame))
            out.mux(stream.encode(None))
        chunks += (tmp_path / "piece.ts").read_bytes()
    (tmp_path / "all.ts").write_bytes(chunks)

    shapes = [f.image.shape[:2] for f in open_source(str(tmp_path / "all.ts")).frames()]

    assert shapes[0] == (64, 96)
    assert (128, 160) in shapes
    assert shapes[-1] == (64, 96)


def test_damaged_packets_are_counted_and_the_rest_is_read(tmp_path):
    data = bytearray(hr_video.clip("bikes").read_bytes())
    rng = np.random.default_rng(3)
    start = data.index(b"mdat") + 2000
    for _ in range(200):
        data[start + int(rng.integers(0, 120_000))] ^= 0xFF
    (tmp_path / "damaged.mp4").write_bytes(data)
    source = open_source(str(tmp_path / "damaged.mp4"))

    count = sum(1 for _ in source.frames())

    assert source.counts.damaged_count > 0
    assert 100 < count <= 250


def test_a_file_may_be_read_again_and_stopped_early():
    source = open_source(str(hr_video.clip("carphone_pristine")))
    first = next(source.frames())

    assert next(source.frames()).pts_ns == first.pts_ns
    source.close()
    assert sum(1 for _ in source.frames()) <= 1


def test_a_folder_gives_its_images_in_natural_order_each_in_its_size(tmp_path):
    for name, size in (("img10.png", (20, 30)), ("img2.png", (8, 9)), ("img1.png", (64, 33))):
        cv2.imwrite(str(tmp_path / name), hr_video.noise(*size)[..., ::-1])
    (tmp_path / "img3.png").write_bytes(b"\x89PNG not an image")
    (tmp_path / "notes.txt").write_text("no image")
    source = open_source(str(tmp_path))

    frames = list(source.frames())

    assert [f.image.shape[:2] for f in frames] == [(64, 33), (8, 9), (20, 30)]
    assert all(f.pts_ns is None for f in frames)
    assert np.array_equal(frames[0].image, hr_video.noise(64, 33))
    assert source.counts.damaged_count == 1


def test_one_image_is_a_source_too(tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), hr_video.noise(8, 9)[..., ::-1])

    (frame,) = open_source(str(tmp_path / "a.png")).frames()

    assert np.array_equal(frame.image, hr_video.noise(8, 9))


def test_natural_order_compares_numbers_as_numbers():
    assert sorted(["b1", "a10", "a9", "7", "a"], key=natural_key) == ["7", "a", "a9", "a10", "b1"]


def _write(path, data):
    path.write_bytes(data)
    return str(path)


def _headless(path):
    """A clip whose pictures are all zeros."""
    data = bytearray(hr_video.clip("carphone_pristine").read_bytes())
    start = data.index(b"mdat") + 4
    data[start:] = bytes(len(data) - start) if data.index(b"moov") < start else data[start:]
    end = data.index(b"moov") - 4 if data.index(b"moov") > start else len(data)
    data[start:end] = bytes(end - start)
    return _write(path, data)


def _sound_only(path):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return str(path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda p: str(p / "none.mp4"), "no such video file or folder", id="missing"),
        pytest.param(lambda p: "", "no such video", id="empty-text"),
        pytest.param(str, "holds no image", id="empty-folder"),
        pytest.param(lambda p: "gopher://x", "gopher:// are not known", id="unknown-address"),
        pytest.param(lambda p: _write(p / "a.mp4", b""), "is not a video", id="empty-file"),
        pytest.param(lambda p: _write(p / "a.mp4", b"hello world" * 99), "is not a video", id="text"),
        pytest.param(lambda p: _headless(p / "a.mp4"), "not one picture", id="no-picture"),
        pytest.param(lambda p: _sound_only(p / "a.wav"), "no video stream .it holds: audio", id="sound"),
        pytest.param(lambda p: "987", "no camera 987", id="no-camera"),
        pytest.param(lambda p: "rtsp://u:secret@127.0.0.1:1/x", "can't open rtsp://u:...@127", id="no-rtsp"),
    ],
)
def test_what_can_not_be_read_is_told_in_one_line(tmp_path, make, words):
    with pytest.raises(SourceError, match=words) as caught:
        list(open_source(make(tmp_path), SourceOptions(open_timeout_s=2)).frames())

    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_password_is_not_shown():
    assert redact("rtsp://me:s3cret@cam/1?a=b") == "rtsp://me:***@cam/1?a=b"
    assert redact("rtsp://cam/1") == "rtsp://cam/1"
    assert redact("/tmp/a:b@c.mp4") == "/tmp/a:b@c.mp4"


def test_a_missing_package_names_the_remedy():
    """Without PyAV the error says what to install; the module itself can still be imported."""
    code = (
        "import sys; sys.modules['av'] = None; sys.modules['cv2'] = None\n"
        "from headrace.clients.video.sources import open_source, SourceError, ImageSource\n"
        "for make in (lambda: open_source('rtsp://x'), lambda: ImageSource('x', [])):\n"
        "    try: make()\n"
        "    except SourceError as error: print(error)\n"
    )

    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)

    assert done.stdout.count("pip install 'headrace[video]'") == 2, done.stderr


class _Handler(http.server.BaseHTTPRequestHandler):
    """/clip is a recording with a length; /live is a stream that breaks off without one."""

    def do_GET(self):
        data = self.server.data[self.path]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if self.path == "/clip.mp4":
            self.send_response(206)
            self.send_header("Content-Length", str(len(data) - start))
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            data = data[start:]
        else:
            self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # the reader may have had enough
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path):
    path = tmp_path / "live.ts"
    with av.open(str(path), "w", format="mpegts") as out:
        stream = out.add_stream("mpeg2video", rate=25)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        for number in range(10):
            frame = av.VideoFrame.from_ndarray(hr_video.noise(64, 96, number), "rgb24")
            frame.pts = number
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.data = {
        "/clip.mp4": hr_video.clip("carphone_pristine").read_bytes(),
        "/live": path.read_bytes(),
    }
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_recording_on_the_web_ends_and_is_paced(web):
    source = open_source(f"{web}/clip.mp4")

    assert not source.is_live
    assert sum(1 for _ in source.frames()) == 120
    assert source.counts.reconnect_count == 0


def test_a_live_stream_on_the_web_is_opened_again_when_it_breaks(web):
    source = open_source(f"{web}/live", SourceOptions(back_off_first_ms=1))
    times = []

    for frame in source.frames():
        times.append(frame.pts_ns)
        if source.counts.reconnect_count == 2:
            source.close()

    assert source.is_live
    assert len(times) > 15
    assert all(a < b for a, b in itertools.pairwise(times))


def test_a_web_address_that_does_not_answer_is_told():
    with pytest.raises(SourceError, match=r"can't open http://127\.0\.0\.1:1/x"):
        open_source("http://127.0.0.1:1/x", SourceOptions(open_timeout_s=2))


def test_a_live_source_is_opened_again_and_its_time_goes_on_rising():
    """A file stands in for a camera that breaks off: after the break the time has moved on by the pause."""
    source = ContainerSource(
        str(hr_video.clip("carphone_pristine")), is_live=True, options=SourceOptions(back_off_first_ms=1)
    )
    times = []

    for frame in source.frames():
        times.append(frame.pts_ns)
        if len(times) == 300:
            source.close()

    assert len(times) == 300
    assert all(a < b for a, b in itertools.pairwise(times))
    assert source.counts.reconnect_count == 2


def test_a_live_source_gives_up_after_the_failures_allowed(tmp_path):
    path = tmp_path / "camera.mkv"
    hr_video.write_lossless(path, [hr_video.noise(16, 16)] * 2, [0, 40])
    options = SourceOptions(back_off_first_ms=1, back_off_limit_ms=2, max_reconnects=3)
    frames = ContainerSource(str(path), is_live=True, options=options).frames()
    next(frames)
    path.unlink()

    with pytest.raises(SourceError, match="gave up after 3 failed"):
        list(frames)


class _Camera:
    """Gives frames as the test says; ``close`` ends it."""

    name, is_live = "camera", True

    def __init__(self, error=None):
        self.given = threading.Semaphore(0)
        self.taken = threading.Semaphore(0)
        self.error = error
        self.is_closed = False

    def frames(self):
        for number in range(100):
            self.given.acquire()
            if self.is_closed:
                return
            if self.error is not None and number == 1:
                raise self.error
            yield number
            self.taken.release()

    def close(self):
        self.is_closed = True
        self.given.release()


def test_a_slow_taker_gets_the_newest_frame_and_the_others_are_counted():
    """VID-01: age is bounded by dropping, and the drops are counted."""
    camera = _Camera()
    newest = NewestFrames(camera)
    for _ in range(5):
        camera.given.release()
        assert camera.taken.acquire(timeout=10)

    frame = next(iter(newest))
    newest.close()

    assert frame == 4
    assert newest.missed_count == 4
    newest._thread.join(10)
    assert not newest._thread.is_alive()


def test_an_error_of_the_source_reaches_the_taker():
    camera = _Camera(error=SourceError("cable cut"))
    newest = NewestFrames(camera)
    camera.given.release(2)

    with pytest.raises(SourceError, match="cable cut"):
        list(newest)
