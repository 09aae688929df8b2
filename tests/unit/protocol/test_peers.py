"""Messages between peers: ranges, paths, hashes and the texts of refusals."""

from __future__ import annotations

import copy

import hr_wire
import msgpack
import pytest

from headrace.errors import RemoteProtocolError
from headrace.protocol import codec, messages
from headrace.protocol.fields import cut_text, shown

LIMITS = hr_wire.LIMITS


def header_of(name: str) -> dict:
    return msgpack.unpackb(bytes(codec.encode(hr_wire.SAMPLES[name])[0]))


def code_of(header: dict) -> str | None:
    try:
        codec.decode([msgpack.packb(header)], LIMITS)
    except RemoteProtocolError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../x", "a/../b", "a//b", "./a", "a/", "C:/x", "a\\b", "a\0b", "x" * 4097],
    ids=lambda path: repr(path)[:20],
)
def test_a_model_file_can_not_lead_out_of_its_folder(path):
    """The worker joins the path to its cache: nothing that a broker says may leave it."""
    header = header_of("setup")
    header["models"][0]["files"][0]["path"] = path

    assert code_of(header) in {"bad_field", "out_of_range"}


@pytest.mark.parametrize("sha256", ["", "ab", "AB" * 32, "ag" * 32, "ab" * 33], ids=lambda text: text[:6])
def test_a_hash_is_64_lowercase_digits(sha256):
    """One spelling, as it names a file in the cache."""
    header = header_of("setup")
    header["models"][0]["files"][0]["sha256"] = sha256

    assert code_of(header) == "bad_field"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("channels", 0), ("channels", 5), ("pad_value", 256), ("pad_value", -1), ("scale", float("nan")),
        ("scale", float("inf")), ("mean", [float("nan")]), ("mean", [0.0] * 5), ("std", [0.0, 1.0, 1.0]),
        ("std", [0]), ("color", "yuv"),
    ],
)  # fmt: skip
def test_image_input_ranges(field, value):
    """Not a number, division by zero and colours that do not exist are refused before a worker uses them."""
    header = header_of("setup")
    header["models"][0]["image"][field] = value

    assert code_of(header) in {"out_of_range", "bad_field"}


@pytest.mark.parametrize(
    "buckets",
    [[[4, 1.0], [1, 1.0]], [[1, 1.0], [1, 2.0]], [[0, 1.0]], [[1, -1.0]], [[1, float("nan")]], [[1]], [1], 5],
    ids=repr,
)
def test_buckets_ascend_and_take_time(buckets):
    """The cost table is seeded by them."""
    header = header_of("ready")
    header["models"][0]["classes"][0]["buckets"] = buckets

    assert code_of(header) in {"out_of_range", "bad_field"}


@pytest.mark.parametrize("dtype", ["", "x" * 33, 5, None], ids=repr)
def test_a_graph_input_may_have_any_short_dtype_name(dtype):
    """The graph's own dtype is a name to show, not one to compute with."""
    header = header_of("ready")
    header["models"][0]["inputs"][0]["dtype"] = dtype

    assert code_of(header) == (None if dtype == "" else "bad_dtype")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("welcome", "credits", -1),
        ("welcome", "heartbeat_ms", 0),
        ("hello", "epoch", -1),
        ("ready", "slots", 0),
        ("ready", "slots", 1025),
        ("credit", "by_status", {"fine": 1}),
        ("credit", "streams", {"": 1}),
        ("credit", "streams", {"a\0": 1}),
        ("credit", "streams", {"a": -1}),
        ("worker_hello", "worker", ""),
        ("worker_hello", "worker", "x" * 257),
        ("request", "method", ""),
        ("request", "params", {"a": {b"b": 1}}),
        ("failed", "message", "x" * 2049),
    ],
)
def test_ranges_of_other_fields(name, field, value):
    """Each bound is checked where the message is read."""
    assert code_of(header_of(name) | {field: value}) in {"out_of_range", "bad_field", "bad_stream"}


@pytest.mark.parametrize("field", ["max_frame_bytes", "priority_levels"])
def test_limits_are_positive(field):
    """A limit of 0 would be one that nothing can meet."""
    header = header_of("welcome")
    header["limits"][field] = 0

    assert code_of(header) == "out_of_range"


def test_lists_are_bounded():
    """No list of a message can be longer than its bound, whatever the header's size allows."""
    header = header_of("welcome")
    model = header["models"][0]
    for field, count in (("files", 257), ("size_classes", 65)):
        changed = copy.deepcopy(header)
        changed["models"][0][field] = model[field] * count

        assert code_of(changed) == "out_of_range"


def test_a_required_field_inside_a_list_is_named_with_its_place():
    """The reader of the refusal finds the spot."""
    header = header_of("setup")
    del header["models"][0]["size_classes"][1]["height"]

    with pytest.raises(RemoteProtocolError, match=r"models\[0\]\.size_classes\[1\]\.height is missing"):
        codec.decode([msgpack.packb(header)], LIMITS)


@pytest.mark.parametrize(("height", "width"), [(0, 5), (5, 0), (-1, -1), (65_537, 1)], ids=str)
def test_a_size_class_has_two_sides_or_none(height, width):
    """Half a size is none."""
    header = header_of("setup")
    header["models"][0]["size_classes"][0] |= {"height": height, "width": width}

    assert code_of(header) == "out_of_range"


def test_the_class_of_a_tensor_model_has_no_size():
    """A worker that serves tensors says so in READY."""
    tensors = messages.ClassProfile(messages.SizeClassSpec("tensor", 0, 0), ((1, 2.0),))
    ready = messages.Ready("w", 1, 2, (messages.ModelProfile("m", "1", (tensors,), ()),))

    assert codec.decode(codec.encode(ready), LIMITS) == ready


def test_limits_are_sent_whole():
    """Two releases may differ in their defaults; limits that are equal to them are sent all the same."""
    assert header_of("setup")["limits"]["max_frame_bytes"] == LIMITS.max_frame_bytes


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 100, "'" + "x" * 48 + "'..."),
        ("a\n", "'a\\n'"),
        (5, "5"),
        (None, "None"),
        ([1, 2], "a list of 2"),
        ({"a": 1}, "a map of 1"),
        (b"abc", "3 bytes"),
        (object(), "object"),
    ],
    ids=["long", "newline", "number", "nil", "list", "map", "bytes", "other"],
)
def test_a_peers_value_is_quoted_short_and_escaped(value, text):
    """A refusal fits on a line whatever was sent."""
    assert shown(value) == text


def test_cut_text_leaves_short_texts_alone():
    """Only what is too long is cut, and marked."""
    assert cut_text("x" * 2048) == "x" * 2048
    assert cut_text("x" * 2049) == "x" * 2045 + "..."
