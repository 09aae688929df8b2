"""The stream table: what was seen of an epoch, and numbers that never go back."""

from __future__ import annotations

from headrace.broker import stream_table
from headrace.broker.records import Refusal
from headrace.broker.stream_table import EPOCHS_PER_STREAM, EpochHistory, Stream, StreamTable


class TestEpochHistory:
    """Runs of seqs."""

    def test_consecutive_seqs_are_one_run(self) -> None:
        """A stream of any length costs the same."""
        history = EpochHistory()

        for seq in range(10_000):
            history.note(seq, 16)

        assert (list(history.firsts), list(history.lasts)) == ([0], [9_999])
        assert history.has_seen(0)
        assert history.has_seen(9_999)
        assert not history.has_seen(10_000)

    def test_gaps_are_not_seen(self) -> None:
        """Only what came is known."""
        history = EpochHistory()
        for seq in (3, 4, 8, 2**64 - 1):
            history.note(seq, 16)

        seen = [seq for seq in range(12) if history.has_seen(seq)]

        assert seen == [3, 4, 8]
        assert history.has_seen(2**64 - 1)

    def test_runs_are_bounded(self) -> None:
        """The oldest run is forgotten first."""
        history = EpochHistory()
        for seq in range(0, 20, 2):
            history.note(seq, 3)

        assert list(history.firsts) == [14, 16, 18]
        assert not history.has_seen(12)

    def test_rejects_are_bounded(self) -> None:
        """The oldest reject is forgotten first."""
        history = EpochHistory()
        for seq in range(5):
            history.note_reject(seq, Refusal("x", "y"), 2)

        assert list(history.rejects) == [3, 4]


class TestEpochs:
    """Epochs of one stream."""

    def test_oldest_epoch_goes_but_neither_the_owners_nor_one_with_unfinished_frames(self) -> None:
        """Two producers that restart for ever do not grow a stream."""
        stream = Stream("a", 0, 0, owner_epoch=0)
        stream.history(0)
        stream.history(1).unfinished_count = 1

        for epoch in range(2, 50):
            stream.history(epoch)

        assert list(stream.epochs) == [0, 1, *range(44, 50)]
        assert len(stream.epochs) == EPOCHS_PER_STREAM

    def test_epochs_that_all_have_unfinished_frames_stay(self) -> None:
        """Those are bounded by the frames themselves."""
        stream = Stream("a", 0, 0)
        for epoch in range(EPOCHS_PER_STREAM + 1):
            stream.history(epoch).unfinished_count = 1

        assert len(stream.epochs) == EPOCHS_PER_STREAM + 1


class TestTable:
    """Streams that come and go."""

    def test_numbers_of_forgotten_streams_never_go_back(self, monkeypatch: object) -> None:
        """When even the compact table overflows, unknown streams start above all that was dropped."""
        table = StreamTable(max_streams=1, idle_ns=10, min_idle_ns=0)
        limit = stream_table.FORGOTTEN_PER_STREAM
        for number in range(limit + 3):
            stream, _ = table.open(f"s{number}", number)
            assert stream is not None
            stream.next_pub_seq += 100 - number

        returned, evicted = table.open("s0", 1_000)

        assert evicted is not None
        assert returned is not None
        assert returned.next_pub_seq >= 100
        assert table.next_pub_seq("s5") == 95
        assert table.next_pub_seq("never") is None

    def test_no_stream_is_idle_in_an_empty_table(self) -> None:
        """Nothing to forget, nothing to wake up for."""
        table = StreamTable(max_streams=1, idle_ns=10, min_idle_ns=0)

        assert table.next_idle_ns() is None
        assert table.pop_idle(1_000) is None
