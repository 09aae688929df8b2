"""Carry out the core's actions: encode and send, without ever waiting.

A peer that can't be sent to is noted in ``unreachable``; the shell tells the core in the same turn. Not here:
when actions are carried out, and anything that is read.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import assert_never

import structlog
import zmq

from headrace.broker import actions
from headrace.broker.arenas import Arenas
from headrace.broker.counters import Counters, count
from headrace.broker.sockets import Role, Socket, send
from headrace.errors import Code, RemoteError
from headrace.protocol import codec
from headrace.protocol.messages import (
    Buffer,
    Cancel,
    Endpoints,
    Goodbye,
    Heartbeat,
    Limits,
    Message,
    ModelSpec,
    Outcome,
    Outcomes,
    Refused,
    ReplayReply,
    Reply,
    Setup,
    Subscribed,
    Welcome,
)

#: Outcomes of one stream put into one published message at most.
MAX_BUNDLE = 64

#: Each routing id stands before the core with the letter of its socket: no two sockets' peers are ever
#: confused.
PREFIXES: dict[Role, bytes] = {Role.FRAMES: b"f", Role.WORKERS: b"w", Role.CONTROL: b"c"}

_ROLES = {prefix[0]: role for role, prefix in PREFIXES.items()}

#: Reports that a bad input or model can cause again and again. Warnings are counted and summarised by the
#: log; all other reports are changes of state, of which each one is written.
_REPEATING = frozenset({"batch failed", "wrong result count"})

log = structlog.get_logger()


class Outbound:
    """Sends to peers and publishes. Owned by the loop's thread, as the sockets are."""

    def __init__(
        self,
        sockets: dict[Role, Socket],
        endpoints: Endpoints,
        limits: Limits,
        heartbeat_ms: int,
        counters: Counters,
        arenas: Arenas | None = None,
    ) -> None:
        self._sockets = {prefix: sockets[role] for prefix, role in _ROLES.items()}
        self._results = sockets[Role.RESULTS]
        self._endpoints = endpoints
        self._limits = limits
        self._heartbeat_ms = heartbeat_ms
        self._counters = counters
        self._arenas = arenas or Arenas(None, "")
        self._remote: dict[bytes, None] = {}  # workers that can't read the producers' arenas
        self._heartbeat = codec.encode(Heartbeat())
        self._greeted: dict[bytes, None] = {}  # peers that are told when the broker stops
        #: Peers that could not be sent to, each with the batches whose own send failed.
        self.unreachable: dict[bytes, list[int]] = {}

    def carry_out(self, todo: list[actions.Action]) -> None:
        """Carry out the actions in their order.

        Within a run of outcomes those of one stream leave together, as one message; only streams are
        moved past each other, which no subscriber can tell.
        """
        index = 0
        while index < len(todo):
            action = todo[index]
            index += 1
            match action:
                case actions.PublishOutcome(outcome):
                    by_stream = {outcome.stream: [outcome]}
                    while index < len(todo):
                        following = todo[index]
                        if not isinstance(following, actions.PublishOutcome):
                            break
                        by_stream.setdefault(following.outcome.stream, []).append(following.outcome)
                        index += 1
                    for outcomes in by_stream.values():
                        for start in range(0, len(outcomes), MAX_BUNDLE):
                            self._publish(outcomes[start : start + MAX_BUNDLE])
                case actions.SendBatch(peer, batch):
                    if peer in self._remote:
                        batch = self._arenas.with_payloads(batch)
                    if not self.send(peer, batch):
                        self.unreachable[peer].append(batch.batch)
                case actions.GrantCredit(peer, credit):
                    self.send(peer, credit)
                case actions.SendReject(peer, reject):
                    self.send(peer, reject)
                case actions.SendHeartbeat(peer, _, None):
                    self._send_parts(peer, self._heartbeat)
                case _:
                    self._carry_out_rare(action)

    def send(self, peer: bytes, message: Message) -> bool:
        """Send one message; return whether the peer could be sent to."""
        return self._send_parts(peer, codec.encode(message))

    def reply(self, peer: bytes, message: Message) -> None:
        """Answer a control request. A replay that is more than one message can carry is cut, and says so;
        any other answer that nobody could read is replaced by the reason."""
        parts = codec.encode(message)
        while isinstance(message, ReplayReply) and not self._fits(parts, len(message.outcomes)):
            kept = message.outcomes[: len(message.outcomes) // 2]
            message = replace(message, outcomes=kept, has_more=True)
            parts = codec.encode(message)
        if isinstance(message, Reply) and len(parts[0]) > self._limits.max_header_bytes:
            text = f"the answer has {len(parts[0])} bytes, more than limits.max_header_bytes lets anyone read"
            parts = codec.encode(Reply(message.id, code=Code.MESSAGE_TOO_LARGE, message=text))
        self._send_parts(peer, parts)

    def refuse(self, peer: bytes, error: RemoteError) -> None:
        """Tell a peer that its message was not taken, and why."""
        self.send(peer, Refused(error.code, error.message))

    def introduce(self, peer: bytes) -> None:
        """Answer Discover."""
        self.send(peer, self._endpoints)

    def confirm_subscription(self, topic: bytes) -> None:
        """Publish, on exactly this topic, that the subscription has been taken."""
        text = topic.removesuffix(b"\0").decode(errors="replace")
        send(self._results, [topic, *codec.encode(Subscribed(self._endpoints.boot, text))])

    def say_goodbye(self, reason: str) -> None:
        """Tell every peer that introduced itself that the broker stops."""
        parts = codec.encode(Goodbye(reason))
        for peer in list(self._greeted):
            self._send_parts(peer, parts)

    def forget(self, peer: bytes) -> None:
        """Forget a peer that left."""
        self._greeted.pop(peer, None)
        self._remote.pop(peer, None)

    def _carry_out_rare(self, action: actions.Action) -> None:
        match action:
            case actions.SendHeartbeat(peer, _, probe):
                self.send(peer, Heartbeat(probe))
            case actions.CancelBatch(peer, batch):
                self.send(peer, Cancel(batch))
            case actions.WelcomeProducer(peer, credits_count, models, is_shm_possible):
                self._greet(peer, self._welcome(credits_count, models, is_shm_possible))
            case actions.SetUpWorker(peer, models, host_key):
                if not self._arenas.is_here(host_key):
                    self._remote[peer] = None
                self._greet(peer, self._setup(models))
            case actions.SendToWorker(peer, order):
                self.send(peer, order)
            case actions.RefusePeer(peer, code, message):
                self.forget(peer)
                self.send(peer, Refused(code, message))
            case actions.Report(name, values):
                count(self._counters.reports, name)
                if name in _REPEATING:
                    log.warning(name, **values)
                else:
                    log.info(name, **values)
            case (
                actions.PublishOutcome() | actions.SendBatch() | actions.GrantCredit() | actions.SendReject()
            ):
                raise AssertionError(f"carry_out() owns {type(action).__name__}")
            case _:
                assert_never(action)

    def _greet(self, peer: bytes, message: Message) -> None:
        if self.send(peer, message):
            self._greeted[peer] = None

    def _welcome(self, credits_count: int, models: tuple[ModelSpec, ...], is_shm_possible: bool) -> Welcome:
        return Welcome(
            boot=self._endpoints.boot,
            credits=credits_count,
            heartbeat_ms=self._heartbeat_ms,
            limits=self._limits,
            models=tuple(replace(model, files=(), gpu_files=(), fp32_files=()) for model in models),
            endpoints=self._endpoints,
            is_shm_possible=is_shm_possible,
        )

    def _setup(self, models: tuple[ModelSpec, ...]) -> Setup:
        return Setup(
            boot=self._endpoints.boot,
            heartbeat_ms=self._heartbeat_ms,
            limits=self._limits,
            models=models,
            endpoints=self._endpoints,
        )

    def _publish(self, outcomes: list[Outcome]) -> None:
        """Publish outcomes of one stream, in as few messages as can carry them."""
        parts = codec.encode_published(Outcomes(tuple(outcomes)))
        if not self._fits(parts[1:], len(outcomes)):
            half = len(outcomes) // 2
            self._publish(outcomes[:half])
            self._publish(outcomes[half:])
            return
        # XPUB never refuses: a subscriber whose queue is full loses the message and sees the gap.
        send(self._results, parts)
        self._counters.published_count += len(outcomes)
        self._counters.published_message_count += 1

    def _fits(self, parts: list[Buffer], count: int) -> bool:
        """Tell whether a message of ``count`` outcomes is within what receivers take. One always is: it came
        in under the same limits."""
        limits = self._limits
        return count <= 1 or (
            count <= limits.max_frames_per_message
            and len(parts[0]) <= limits.max_header_bytes
            and sum(map(len, parts)) <= limits.max_message_bytes
        )

    def _send_parts(self, peer: bytes, parts: list[Buffer]) -> bool:
        if peer in self.unreachable:
            # A message to it was dropped in this turn and its session is about to be closed: one sent after
            # the gap (a credit after a lost reject, say) would tell it what is not so.
            return False
        try:
            send(self._sockets[peer[0]], [peer[1:], *parts])
        except zmq.ZMQError as error:
            if error.errno not in {errno.EAGAIN, errno.EHOSTUNREACH}:
                raise
            self._counters.unreachable_count += 1
            self.forget(peer)
            self.unreachable.setdefault(peer, [])
            return False
        return True
