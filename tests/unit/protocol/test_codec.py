"""encode and decode as a whole: every message whole, cut, lengthened and with each field of a wrong type."""

from __future__ import annotations

import copy

import hr_wire
import msgpack
import pytest

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.messages import (
    BadFrame,
    Cancel,
    Discover,
    Done,
    Failed,
    Frames,
    Heartbeat,
    Refused,
    Reply,
    Subscribed,
)

LIMITS = hr_wire.LIMITS
#: Values that may be any msgpack tree: a wrong type does not exist inside them.
FREE_FIELDS = {"meta", "outputs", "params", "result", "adapter_options"}


def refusal_code(parts, expected=None) -> str | None:
    """The code with which the message, or any frame of it, is refused; None when it is accepted."""
    try:
        message = codec.decode(parts, LIMITS, expected)
    except RemoteProtocolError as error:
        return error.code
    if type(message) is Frames:
        return next((frame.code for frame in message.frames if type(frame) is BadFrame), None)
    return None


def header_of(name: str) -> dict:
    return msgpack.unpackb(bytes(codec.encode(hr_wire.SAMPLES[name])[0]))


def with_header(name: str, header: dict) -> list:
    return [msgpack.packb(header), *codec.encode(hr_wire.SAMPLES[name])[1:]]


def paths_of(value: object, path: tuple = ()) -> list[tuple]:
    """Every path inside a header that leads to a field or an item, free-form trees left out."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    paths = []
    for key, item in items:
        paths.append((*path, key))
        if key not in FREE_FIELDS:
            paths += paths_of(item, (*path, key))
    return paths


def replaced(header: dict, path: tuple, value: object) -> dict:
    changed = copy.deepcopy(header)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return changed


def wrong_values(value: object, key: object) -> list[object]:
    """Values whose type can't be meant by a field that holds ``value``."""
    if key == "outputs":
        return []  # any value at all
    if value is None and isinstance(key, int):
        return []  # a row that leaves the column's field out
    if isinstance(value, bool):
        return [1, "true", [], b"\x01"]
    if isinstance(value, int | float):
        return ["1", True, [1], {}, b"\x01", float("nan"), float("inf")]
    if isinstance(value, str):
        return [5, True, [value], {}, b"text", 1.5]
    if isinstance(value, list):
        return [5, "text", True, b"\x01", {"0": 1}]
    return [5, "text", True, b"\x01", [1]]


FIELD_CASES = [
    pytest.param(name, path, id=f"{name}-{'.'.join(map(str, path))}")
    for name in hr_wire.SAMPLES
    for path in paths_of(header_of(name))
]


@pytest.mark.parametrize(("name", "path"), FIELD_CASES)
def test_a_field_of_a_wrong_type_is_refused(name, path):
    """Each field of each message, replaced by values of other types, is refused with a code."""
    header = header_of(name)
    value = header
    for key in path:
        value = value[key]
    accepted = []

    for wrong in wrong_values(value, path[-1]):
        code = refusal_code(with_header(name, replaced(header, path, wrong)))
        if code is None:
            accepted.append(wrong)
        else:
            assert code in set(Code)

    assert accepted == []


@pytest.mark.parametrize("name", hr_wire.SAMPLES)
def test_a_header_cut_at_any_byte_is_refused(name):
    """However much of a header arrives, less than the whole is no message."""
    header, *payloads = codec.encode(hr_wire.SAMPLES[name])

    codes = {refusal_code([header[:length], *payloads]) for length in range(len(header))}

    assert codes == {"bad_msgpack"}


@pytest.mark.parametrize("tail", [b"\0", b"\xc0\xc0\xc0", b"\x80"], ids=["byte", "three", "map"])
@pytest.mark.parametrize("name", hr_wire.SAMPLES)
def test_trailing_bytes_are_refused(name, tail):
    """Bytes behind a whole header are an error, not a second message to be lost."""
    header, *payloads = codec.encode(hr_wire.SAMPLES[name])

    assert refusal_code([header + tail, *payloads]) == "trailing_bytes"


@pytest.mark.parametrize("name", [name for name in hr_wire.SAMPLES if not name.startswith("reply")])
def test_a_payload_cut_at_any_byte_or_lengthened_is_refused(name):
    """A tensor's part has exactly the length that its shape and dtype say."""
    header, *payloads = codec.encode(hr_wire.SAMPLES[name])
    for index, payload in enumerate(payloads):
        if payload.startswith((b"\x89PNG", b"\xff\xd8")):
            continue  # an image's length is the decoder's business
        for changed in [payload[:length] for length in range(len(payload))] + [payload + b"\0"]:
            parts = [header, *payloads]
            parts[index + 1] = changed

            assert refusal_code(parts) in {"size_mismatch", "empty_payload", "part_count"}


@pytest.mark.parametrize("name", [name for name in hr_wire.SAMPLES if not name.startswith("reply")])
def test_a_part_too_many_is_refused(name):
    """A message has exactly the parts that its header announces."""
    parts = codec.encode(hr_wire.SAMPLES[name])

    assert refusal_code([*parts, b"x"]) == "part_count"


@pytest.mark.parametrize(
    "name", ["frame bundle", "batch", "done", "outcomes", "replay_reply", "frame", "frame inputs"]
)
def test_a_part_too_few_is_refused(name):
    """A lone frame is rejected by name for it, any other message as a whole."""
    parts = codec.encode(hr_wire.SAMPLES[name])

    expected = "empty_payload" if name in {"frame", "frame inputs"} else "part_count"
    assert refusal_code(parts[:-1]) == expected


#: Without its type a message is taken for a frame, hence the last three.
LEFT_OUT_CODES = {"missing_field", "bad_field", "bad_stream", "part_count", "size_mismatch", "empty_payload"}


@pytest.mark.parametrize("name", hr_wire.SAMPLES)
def test_a_required_field_left_out_is_refused_and_others_are_not(name):
    """Whatever can be left out has a default; the rest is named in the refusal."""
    header = header_of(name)

    for field in header:
        rest = {key: value for key, value in header.items() if key != field}

        code = refusal_code(with_header(name, rest))

        assert code in LEFT_OUT_CODES | {None}, field


@pytest.mark.parametrize("name", hr_wire.SAMPLES)
def test_unknown_fields_are_ignored(name):
    """A newer peer of the same version may say more than this side understands."""
    header = header_of(name) | {"later": [1, {"x": 2}]}

    assert codec.decode(with_header(name, header), LIMITS) == hr_wire.SAMPLES[name]


@pytest.mark.parametrize("name", hr_wire.SAMPLES)
def test_parts_may_be_any_buffer(name):
    """Bytes, bytearrays and memoryviews decode to equal messages."""
    parts = codec.encode(hr_wire.SAMPLES[name])

    for kind in (bytes, bytearray, memoryview):
        assert codec.decode([kind(part) for part in parts], LIMITS) == hr_wire.SAMPLES[name]


def test_payloads_are_passed_on_and_not_copied():
    """The very buffer that came in is the frame's payload, and goes out again."""
    payload = memoryview(bytearray(6))
    parts = codec.encode(Frames((hr_wire.raw_frame(payload=payload),)))

    message = codec.decode(parts, LIMITS)

    assert parts[1] is payload
    assert message.frames[0].payload is payload


@pytest.mark.parametrize("version", [0, 2, -1, True, "1", 1.0, None, [1]], ids=repr)
def test_another_version_is_refused(version):
    """Both versions are named, so that the reader knows which side to upgrade."""
    parts = [msgpack.packb({"v": version, "type": "heartbeat"})]

    with pytest.raises(RemoteProtocolError, match="version 1") as caught:
        codec.decode(parts, LIMITS)

    assert caught.value.code == "bad_version"


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ({"type": "done", "batch": -1}, Done),
        ({"type": "cancel"}, Cancel),
        ({"type": "x"}, None),
        ({"v": 2}, None),
    ],
    ids=repr,
)
def test_an_error_says_which_message_it_was(header, kind):
    """As far as that could be read: who gets the error may have to know what is missing now."""
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode([msgpack.packb(header)], LIMITS)

    assert caught.value.kind is kind


@pytest.mark.parametrize("kind", ["frames", "", 5, None, True, ["frame"], {"frame": 1}, b"frame"], ids=repr)
def test_an_unknown_type_is_refused(kind):
    """A type that version 1 does not have is named in the refusal."""
    assert refusal_code([msgpack.packb({"v": 1, "type": kind})]) == "unknown_type"


ROLES = {
    "FROM_PRODUCER": {"frame", "hello", "heartbeat", "goodbye", "discover"},
    "FROM_INTAKE": {"frame"},
    "FROM_WORKER": {
        "worker_hello",
        "ready",
        "done",
        "failed",
        "telemetry",
        "loaded",
        "not_loaded",
        "compared",
        "heartbeat",
        "goodbye",
        "discover",
    },
    "FROM_CONTROL": {"request", "heartbeat", "goodbye", "discover"},
    "TO_PRODUCER": {"welcome", "credit", "reject", "refused", "endpoints", "heartbeat", "goodbye"},
    "TO_WORKER": {
        "setup",
        "batch",
        "cancel",
        "load",
        "unload",
        "compare",
        "refused",
        "endpoints",
        "heartbeat",
        "goodbye",
    },
    "TO_CONTROL": {"reply", "replay_reply", "refused", "endpoints", "heartbeat", "goodbye"},
    "PUBLISHED": {"outcomes", "subscribed"},
}


@pytest.mark.parametrize("role", ROLES)
def test_each_socket_takes_only_its_own_messages(role):
    """A message on the wrong socket is refused by its type, and the refusal names what is taken there."""
    for name, message in hr_wire.SAMPLES.items():
        type_name = codec.TYPE_NAMES[type(message)]
        code = refusal_code(codec.encode(message), getattr(codec, role))

        assert code == (None if type_name in ROLES[role] else "unexpected_type"), name


def test_the_refusal_of_an_unexpected_type_names_it_and_the_expected_ones():
    """Somebody who connected to the wrong port reads what he sent and what belongs there."""
    with pytest.raises(RemoteProtocolError, match="type worker_hello has no place here, which takes frame"):
        codec.decode(codec.encode(hr_wire.SAMPLES["worker_hello"]), LIMITS, codec.FROM_INTAKE)


def test_a_message_without_parts_is_refused():
    """ZeroMQ never delivers one, a caller's slip might."""
    assert refusal_code([]) == "part_count"


def test_a_reply_has_a_bounded_number_of_parts():
    """The parts of a reply are not described by its header, so they are counted."""
    parts = codec.encode(Reply(1, payloads=(b"",) * (LIMITS.max_frames_per_message + 1)))

    assert refusal_code(parts) == "part_count"


def test_an_explanation_that_is_too_long_is_cut_by_its_sender():
    """No message is lost because an error text was long."""
    message = codec.decode(codec.encode(Failed(1, "batch_failed", "x" * 5000)), LIMITS)

    assert len(message.message) == 2048
    assert message.message.endswith("x...")


def test_a_bad_frame_can_not_be_sent():
    """BadFrame is what a decoder makes; sending one is a bug of ours and fails at once."""
    with pytest.raises(ValueError, match="can't be sent"):
        codec.encode(Frames((BadFrame("bad_dtype", "no"),)))


def test_a_topic_ends_with_nul():
    """The topic of cam-1 is no prefix of the topic of cam-10."""
    assert codec.topic_of("cam-é") == b"cam-\xc3\xa9\0"
    assert not codec.topic_of("cam-10").startswith(codec.topic_of("cam-1"))


@pytest.mark.parametrize(
    ("message", "topic", "expected"),
    [
        (hr_wire.SAMPLES["outcomes"], None, b"cam-1\0"),
        (Subscribed(7, "site-a/"), None, b"site-a/"),
        (Subscribed(7, "cam-1"), b"cam-1\0", b"cam-1\0"),
    ],
    ids=["outcomes", "prefix", "exact"],
)
def test_published_messages_carry_their_topic_in_front(message, topic, expected):
    """What is published can be subscribed to by its first part, and read back."""
    parts = codec.encode_published(message, topic)

    assert parts[0] == expected
    assert codec.decode_published(parts, LIMITS) == message


def test_outcomes_under_another_topic_are_refused():
    """A subscriber of one stream is never handed another stream's outcome as its own."""
    parts = codec.encode_published(hr_wire.SAMPLES["outcomes"])

    with pytest.raises(RemoteProtocolError, match="topic"):
        codec.decode_published([b"cam-2\0", *parts[1:]], LIMITS)


@pytest.mark.parametrize("message", [Heartbeat(), Discover(), Cancel(1), Refused("a", "b")], ids=repr)
def test_other_messages_are_not_published(message):
    """Only outcomes and the answer to a subscription travel on the results socket."""
    with pytest.raises(RemoteProtocolError, match="has no place here"):
        codec.decode_published([b"", *codec.encode(message)], LIMITS)


def test_a_topic_alone_is_refused():
    """A published message without header is no message."""
    with pytest.raises(RemoteProtocolError, match="at least one part"):
        codec.decode_published([b"cam-1\0"], LIMITS)


def test_outcomes_of_two_streams_in_one_message_are_refused():
    """One published message is of one stream: its topic could not name two."""
    as_table = header_of("outcomes")
    del as_table["shared"]["stream"]
    as_table["columns"]["stream"] = ["cam-1", "cam-2"]
    entry = {"epoch": 1, "seq": 2, "boot": 3, "pub_seq": 4, "status": "ok"}
    entries = [entry | {"stream": "cam-1"}, entry | {"stream": "cam-2"}]
    as_list = {"v": 1, "type": "outcomes", "outcomes": entries}

    assert refusal_code(with_header("outcomes", as_table)) == "bad_field"
    assert refusal_code([msgpack.packb(as_list)]) == "bad_field"
