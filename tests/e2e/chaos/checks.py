"""The account of a chaos run, made up from the files that its processes left behind.

Shares no code with headrace: what is read here is what users saw. Each check returns sentences, one for
each thing that is wrong; an empty list is a pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

#: Sentences about one thing; the rest is counted.
MAX_SENTENCES = 5

ENDS = ("ok", "error", "expired", "superseded")


class FrameName(NamedTuple):
    stream: str
    epoch: int
    seq: int


class Seen(NamedTuple):
    """An outcome as a subscriber wrote it down."""

    stream: str
    boot: int
    pub_seq: int
    frame: FrameName
    status: str
    code: str
    duplicates: int


class Missed(NamedTuple):
    """``last`` None: open, nobody can tell."""

    stream: str
    boot: int
    first: int
    last: int | None
    duplicates: int


@dataclass
class ProducerLife:
    """One process of a producer. ``has_ended``: it lived until it was told to stop and owed nothing."""

    name: str
    pushed: dict[FrameName, int] = field(default_factory=dict)
    finished: list[tuple[FrameName, str]] = field(default_factory=list)
    has_ended: bool = False


@dataclass
class SubscriberLife:
    """One process of a subscriber."""

    name: str
    prefix: str = ""
    items: list[Seen | Missed] = field(default_factory=list)
    duplicates: int | None = None  # at its end, if it had one
    has_ended: bool = False


@dataclass
class FinalStatus:
    """What the last broker says when everything has ended."""

    boot: int
    account: dict[str, int]
    next_pub_seq: dict[str, int]
    ready_ns: int


def read_producer(name: str, text: str) -> ProducerLife:
    life = ProducerLife(name)
    for line in _whole_lines(text):
        match line.split(" "):
            case ["pushed", stream, epoch, seq, at_ns]:
                life.pushed[FrameName(stream, int(epoch), int(seq))] = int(at_ns)
            case ["unpushed", stream, epoch, seq]:
                del life.pushed[FrameName(stream, int(epoch), int(seq))]
            case ["finished", stream, epoch, seq, code]:
                life.finished.append((FrameName(stream, int(epoch), int(seq)), code))
            case ["end", *_]:
                life.has_ended = True
            case _:
                raise ValueError(f"{name}: {line!r}")
    return life


def read_subscriber(name: str, text: str, prefix: str = "") -> SubscriberLife:
    life = SubscriberLife(name, prefix)
    for line in _whole_lines(text):
        match line.split(" "):
            case ["outcome", stream, boot, pub_seq, epoch, seq, status, code, duplicates]:
                frame = FrameName(stream, int(epoch), int(seq))
                life.items.append(Seen(stream, int(boot), int(pub_seq), frame, status, code, int(duplicates)))
            case ["missed", stream, boot, first, last, _, duplicates]:
                end = None if last == "-" else int(last)
                life.items.append(Missed(stream, int(boot), int(first), end, int(duplicates)))
            case ["end", *words]:
                life.has_ended = True
                for word in words:
                    if word.startswith("duplicates="):
                        life.duplicates = int(word.partition("=")[2])
            case _:
                raise ValueError(f"{name}: {line!r}")
    return life


def check_all(
    producers: list[ProducerLife], subscribers: list[SubscriberLife], final: FinalStatus
) -> list[str]:
    """Return everything that is wrong."""
    faults = check_account(final)
    for life in producers:
        faults += _few(check_concluded(life))
    for subscriber in subscribers:
        faults += _few(check_no_duplicates(subscriber))
        faults += _few(check_no_holes(subscriber, final))
    faults += _few(check_boots_agree(subscribers))
    faults += _few(check_seen(producers, subscribers, final))
    return faults


def check_account(final: FinalStatus) -> list[str]:
    """accepted = ok + error + expired + superseded, with nothing unfinished."""
    ends = sum(final.account[name] for name in ENDS)
    if final.account["accepted"] != ends:
        return [f"account: {final.account['accepted']} accepted, {ends} ended: {final.account}"]
    return []


def check_concluded(life: ProducerLife) -> list[str]:
    """Each frame of a producer that lived to the end was concluded; none of any producer twice."""
    counts = Counter(frame for frame, _ in life.finished)
    faults = [f"{life.name}: {frame} was concluded {n} times" for frame, n in counts.items() if n > 1]
    faults += [
        f"{life.name}: {frame} was concluded and never pushed" for frame in counts.keys() - life.pushed
    ]
    if life.has_ended:
        faults += [
            f"{life.name}: {frame} was never concluded" for frame in life.pushed.keys() - counts.keys()
        ]
    return faults


def check_no_duplicates(life: SubscriberLife) -> list[str]:
    """No outcome twice, by its number and by its frame."""
    numbers: Counter[tuple[str, int, int]] = Counter()
    frames: Counter[FrameName] = Counter()
    for item in life.items:
        if isinstance(item, Seen):
            numbers[item.stream, item.boot, item.pub_seq] += 1
            frames[item.frame] += 1
    faults = [f"{life.name}: outcome {key} came {n} times" for key, n in numbers.items() if n > 1]
    return faults + [f"{life.name}: {frame} ended {n} times" for frame, n in frames.items() if n > 1]


def check_no_holes(life: SubscriberLife, final: FinalStatus) -> list[str]:
    """Per stream and boot, outcomes and missed ranges follow each other from 0 without a gap, but for the
    second runs of frames, which the subscriber counts; an earlier boot ends with an open missed range, the
    last one (of a subscriber that lived to the end) with the last outcome there is."""
    faults: list[str] = []
    expected: dict[str, tuple[int, int | None]] = {}  # stream: boot, next number (None: nothing more)
    holes = 0
    for item in life.items:
        boot, following = expected.get(item.stream, (item.boot, 0))
        if boot != item.boot:
            if following is not None:
                faults.append(f"{life.name}: {item.stream} left boot {boot} at {following} without a word")
            following = 0
        first = item.pub_seq if isinstance(item, Seen) else item.first
        if following is None or first < following:
            faults.append(f"{life.name}: {item} where number {following} was expected")
            following = first
        holes += first - following
        if isinstance(item, Seen):
            expected[item.stream] = (item.boot, first + 1)
        else:
            expected[item.stream] = (item.boot, None if item.last is None else item.last + 1)
        if holes > item.duplicates:
            faults.append(f"{life.name}: {holes} holes before {item}, {item.duplicates} are second runs")
            holes = item.duplicates
    if not life.has_ended or life.duplicates is None:
        return faults
    for stream, end in final.next_pub_seq.items():
        if not stream.startswith(life.prefix):
            continue
        boot, following = expected.get(stream, (final.boot, 0))
        if boot != final.boot:
            if following is not None:
                faults.append(f"{life.name}: {stream} left boot {boot} at {following} without a word")
            following = 0
        holes += max(0, end - (following or 0))
    if holes != life.duplicates:
        faults.append(f"{life.name}: {holes} holes at the end, {life.duplicates} were second runs")
    return faults


def check_boots_agree(subscribers: list[SubscriberLife]) -> list[str]:
    """A number of a boot means the same outcome to all, and a frame has one number in a boot."""
    by_number: dict[tuple[str, int, int], tuple[FrameName, str, str]] = {}
    by_frame: dict[tuple[int, FrameName], int] = {}
    faults: list[str] = []
    for life in subscribers:
        for item in life.items:
            if not isinstance(item, Seen):
                continue
            what = (item.frame, item.status, item.code)
            known = by_number.setdefault((item.stream, item.boot, item.pub_seq), what)
            if known != what:
                faults.append(f"{life.name}: {item} is {known} elsewhere")
            number = by_frame.setdefault((item.boot, item.frame), item.pub_seq)
            if number != item.pub_seq:
                faults.append(f"{life.name}: {item} was published as {number} too")
    return faults


def check_seen(
    producers: list[ProducerLife], subscribers: list[SubscriberLife], final: FinalStatus
) -> list[str]:
    """The subscribers together saw what the last broker counts, and every frame that was pushed after it
    came up and concluded. What none of them saw (all killed, or missed) is at most the numbers not seen."""
    seen = last_boot(subscribers, final.boot)
    unseen = {
        stream: end - sum(1 for number in range(end) if (stream, number) in seen)
        for stream, end in final.next_pub_seq.items()
    }
    counts = Counter(item.status for item in seen.values())
    faults = [
        f"{counts[status]} {status} seen of {final.account[status]}, {sum(unseen.values())} numbers not seen"
        for status in (*ENDS, "rejected")
        if not 0 <= final.account[status] - counts[status] <= sum(unseen.values())
    ]
    frames = {item.frame for item in seen.values()}
    lost: defaultdict[str, list[FrameName]] = defaultdict(list)
    for life in producers:
        for frame, _ in life.finished if life.has_ended else ():
            if life.pushed.get(frame, 0) > final.ready_ns and frame not in frames:
                lost[frame.stream].append(frame)
    return faults + [
        f"{len(lost_frames)} frames of {stream} were concluded and seen by nobody, such as {lost_frames[0]};"
        f" {unseen.get(stream, 0)} numbers of the stream were not seen"
        for stream, lost_frames in lost.items()
        if len(lost_frames) > unseen.get(stream, 0)
    ]


def last_boot(subscribers: Iterable[SubscriberLife], boot: int) -> dict[tuple[str, int], Seen]:
    """Return every outcome of a boot that any subscriber saw, by stream and number."""
    return {
        (item.stream, item.pub_seq): item
        for life in subscribers
        for item in life.items
        if isinstance(item, Seen) and item.boot == boot
    }


def _whole_lines(text: str) -> list[str]:
    """Return the lines; what a kill has left of a last one is no evidence."""
    return text.split("\n")[:-1]


def _few(faults: list[str]) -> list[str]:
    if len(faults) <= MAX_SENTENCES:
        return faults
    return [*faults[:MAX_SENTENCES], f"... and {len(faults) - MAX_SENTENCES} more like these"]
