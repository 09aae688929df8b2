"""A world of random peers around the broker's core, with a checker of everything that it publishes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import hr_core as hr

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.settings import ClassPolicy, CoreSettings
from headrace.protocol.messages import BadFrame, Done, Failed, FrameResult, Keep, Status

#: Random things that happen in one seed before the drain.
STEPS = 120

STREAMS = ("a", "b", "c/1", "c/2")
WORKERS = ("w1", "w2", "w3")


@dataclass
class World:
    """Peers of a core that lose, repeat, delay and break things, and a checker of what it publishes."""

    rng: random.Random
    driver: hr.CoreDriver
    held: dict[bytes, list[act.SendBatch]] = field(default_factory=dict)
    lost: list[act.SendBatch] = field(default_factory=list)
    seen: dict[tuple[str, int, int], int] = field(default_factory=dict)
    next_pub_seq: dict[str, int] = field(default_factory=dict)
    last_admitted: dict[tuple[str, int], int] = field(default_factory=dict)
    next_seq: dict[tuple[str, int], int] = field(default_factory=dict)
    sent: list[tuple[bytes, object]] = field(default_factory=list)
    connections: int = 0

    def take(self, actions: list[act.Action]) -> None:
        """Check what the core asks for, and let the workers receive it."""
        for action in actions:
            match action:
                case act.PublishOutcome(outcome):
                    key = (outcome.stream, outcome.epoch, outcome.seq)
                    assert key not in self.seen, f"second outcome of {key}"
                    self.seen[key] = outcome.pub_seq
                    assert outcome.pub_seq == self.next_pub_seq.get(outcome.stream, 0)
                    self.next_pub_seq[outcome.stream] = outcome.pub_seq + 1
                    if outcome.status is not Status.REJECTED:
                        place = (outcome.stream, outcome.epoch)
                        assert outcome.seq > self.last_admitted.get(place, -1), "out of order"
                        self.last_admitted[place] = outcome.seq
                        if outcome.status is Status.OK:
                            assert outcome.outputs == outcome.seq, "somebody else's result"
                case act.SendBatch(peer, batch):
                    assert peer in self.held, f"batch for {peer!r}, which is gone"
                    limit = 4 if batch.size_class == "small" else 2
                    assert 1 <= len(batch.frames) <= limit
                    self.held[peer].append(action)
                    assert len(self.held[peer]) <= 2
                case act.SetUpWorker(peer):
                    self.held.setdefault(peer, [])
                case act.RefusePeer(peer):
                    pass
                case _:
                    pass

    def step(self) -> None:
        """One random thing happens."""
        rng = self.rng
        choice = rng.choices(
            (self.burst, self.again, self.answer, self.join, self.lose, self.say_hello, self.odd, self.time),
            weights=(8, 2, 8, 3, 1, 2, 1, 6),
        )[0]
        choice()
        if rng.random() < 0.7:
            self.take(self.driver.tick())

    def burst(self) -> None:
        """A producer sends a few new frames."""
        rng = self.rng
        epoch = rng.choice((1, 1, 1, 2))
        peer = f"p{epoch}".encode()
        for _ in range(rng.randint(1, 8)):
            stream = rng.choice(STREAMS)
            seq = self.next_seq.get((stream, epoch), 0) + rng.choice((0, 0, 0, 1))
            self.next_seq[stream, epoch] = seq + 1
            if rng.random() < 0.05:
                one = BadFrame("bad_shape", "0 pixels", stream, seq, epoch)
            else:
                one = hr.frame(
                    stream,
                    seq,
                    epoch=epoch,
                    size=rng.choice((16, 64, 100, 300)),
                    priority=rng.choice((0, 0, 0, 5)),
                    ttl_ms=rng.choice((None, None, 5, 50)),
                    keep=rng.choice((Keep.ALL, Keep.ALL, Keep.LATEST)),
                )
            self.sent.append((peer, one))
            self.take(self.driver.push(one, peer=peer))

    def again(self) -> None:
        """Some of the last frames arrive a second time."""
        for peer, one in self.sent[-5:]:
            if self.rng.random() < 0.5:
                self.take(self.driver.push(one, peer=peer))

    def answer(self) -> None:
        """A worker answers a batch it holds, well or badly, or one that it was lost with."""
        rng = self.rng
        busy = [peer for peer, batches in self.held.items() if batches]
        if self.lost and rng.random() < 0.2:
            late = self.lost.pop(rng.randrange(len(self.lost)))
            self.take(self.driver.done(late))
            return
        if not busy:
            return
        peer = rng.choice(busy)
        sent = self.held[peer].pop(rng.randrange(len(self.held[peer])))
        kind = rng.random()
        if kind < 0.04:
            self.drop(peer)
            self.take(self.driver.send(events.PeerMisbehaved(peer, "bad_field")))
            return
        if kind < 0.14:
            code = rng.choice(("batch_failed", "shutdown"))
            self.take(self.driver.send(events.BatchFailed(peer, Failed(sent.batch.batch, code, "no"))))
            return
        results = [hr.ok(one.seq or 0) for one in sent.batch.frames]
        if kind < 0.2:
            results[0] = FrameResult(Status.ERROR, "damaged_image", "cut")
        elif kind < 0.25:
            results.append(hr.ok())
        message = Done(sent.batch.batch, tuple(results), 10, rng.choice((1000, 10**12)), 2000)
        self.take(self.driver.send(events.BatchDone(peer, message)))

    def join(self) -> None:
        """A worker (re)connects, as the same process or another one under the same id."""
        rng = self.rng
        self.connections += 1
        peer = f"c{self.connections}".encode()
        name = rng.choice(WORKERS)
        holder = self.driver.core.workers.by_id.get(name)
        actions = self.driver.join_worker(peer, worker=name, instance=rng.choice((1, 2)))
        if holder is not None and self.driver.core.workers.by_id.get(name) is not holder:
            self.drop(holder.peer)
        self.take(actions)

    def drop(self, peer: bytes) -> None:
        """A connection is gone; its answers may still come."""
        self.lost += self.held.pop(peer, [])

    def lose(self) -> None:
        """A worker is unreachable, or says goodbye."""
        rng = self.rng
        peers = list(self.held)
        if not peers:
            return
        peer = rng.choice(peers)
        if rng.random() < 0.3:
            self.take(self.driver.send(events.WorkerLeft(peer)))
            return
        undelivered = tuple(sent.batch.batch for sent in self.held[peer][-1:])
        self.drop(peer)
        self.take(self.driver.send(events.PeerUnreachable(peer, rng.choice(((), undelivered)))))

    def say_hello(self) -> None:
        """A producer says hello or goodbye."""
        epoch = self.rng.choice((1, 2))
        peer = f"p{epoch}".encode()
        if self.rng.random() < 0.8:
            self.take(self.driver.join_producer(peer, epoch))
        else:
            self.take(self.driver.send(events.ProducerLeft(peer)))

    def odd(self) -> None:
        """Something from a peer that nobody knows, or that can't be read."""
        rng = self.rng
        event = rng.choice(
            (
                events.PeerHeard(b"x", is_heartbeat=True),
                events.PeerMisbehaved(b"x", "bad_msgpack"),
                events.PeerMisbehaved(None, "bad_msgpack"),
                events.BatchDone(b"x", Done(1, ())),
                events.BatchFailed(b"x", Failed(1, "batch_failed", "")),
                events.WorkerLeft(b"x"),
                events.PeerUnreachable(b"x"),
            )
        )
        self.take(self.driver.send(event))

    def time(self) -> None:
        """Time passes; most workers are heard from."""
        ms = self.rng.choice((1, 5, 20, 200, 1_500))
        workers = self.driver.core.workers
        for peer in list(self.held):
            if self.rng.random() < 0.9:
                claim = workers.claims.get(workers.by_peer[peer].id) if peer in workers.by_peer else None
                probe = claim.probe if claim is not None and self.rng.random() < 0.7 else None
                self.driver.send(events.PeerHeard(peer, is_heartbeat=True, is_worker=True, probe=probe))
        if ms >= 200:
            # What is older than this is not sent again: an idle stream may be forgotten.
            self.sent.clear()
        actions = self.driver.wait(ms)
        for peer in list(self.held):
            if peer not in self.driver.core.workers.by_peer:
                self.drop(peer)
        self.take([one for one in actions if not isinstance(one, act.SendBatch)])
        for sent in hr.batches(actions):
            if sent.peer in self.held:
                self.held[sent.peer].append(sent)
            else:
                self.lost.append(sent)

    def drain(self) -> None:
        """Everything works from now on: all that was admitted must end."""
        self.take(self.driver.send(events.DrainRequested()))
        self.connections += 1
        peer = f"c{self.connections}".encode()
        self.take(self.driver.join_worker(peer, worker="last"))
        for _ in range(2_000):
            if self.driver.core.is_drained:
                return
            if self.rng.random() < 0.05:
                self.take(self.driver.send(events.GraceEnded()))
            self.take(self.driver.wait(1))
            for worker in list(self.held):
                while self.held[worker]:
                    self.take(self.driver.done(self.held[worker].pop(0)))
        raise AssertionError(f"not drained: {self.driver.core.account}")


def run(seed: int, make_driver: Callable[[CoreSettings], hr.CoreDriver] = hr.CoreDriver) -> World:
    """Run one seed to the drain."""
    rng = random.Random(seed)
    settings = hr.make_settings(
        policy=ClassPolicy(
            policy=rng.choice(("adaptive", "deferred", "window")),
            max_queue_delay_ms=rng.choice((0, 5, "auto")),
            max_queue_size=rng.choice((8, 100)),
            objective_ms=rng.choice((5, 50)),
            promote=rng.random() < 0.5,
        ),
        credits_per_producer=rng.choice((4, 32)),
        max_queued_per_stream=rng.choice((4, 100)),
        max_bytes=rng.choice((300_000, 10**9)),
        max_unfinished_per_stream=rng.choice((6, 100)),
        retention_frames=rng.choice((3, 100)),
        retention_bytes=rng.choice((5_000, 10**6)),
        ageing_ms=20,
        max_streams=rng.choice((3, 100)),
        stream_idle_ms=rng.choice((1_000, 100_000)),
    )
    world = World(rng, make_driver(settings))
    for _ in range(STEPS):
        world.step()
        world.driver.core.check_invariants()
    world.drain()
    world.driver.core.check_invariants()
    return world
