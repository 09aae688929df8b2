"""Which size class is served next, and by which worker.

Not here: when a batch is full enough (batching.py), which frames are in it (queues.py), what becomes of it
later (core.py).

Theory of operation. Once per turn, after all input, the dispatcher repeats until nothing moves: of all size
classes that have something to send and a worker to send it to, serve the most urgent one. A batch that could
still grow (not full, no worker idle) is held back, but never so long that a less urgent class takes the slot.

Ageing holds across classes as it does inside one (queues.py): each time a class is served while another
one, which could have had that slot, holds an aged frame that came earlier, ``debt`` grows by share / (1 -
share) for each frame served; at 1 or more the aged class goes first and pays for its frames. So the bound
of queues.py holds for all classes together, with one whole batch in place of one frame.

Which worker: an idle one, the fastest of them; else, for a full batch only (the policies see to that), the
busy one with a free slot that would finish it first. An idle worker is passed over when it is so slow that
all that waits would be finished sooner by waiting for a faster one: between a 10 ms and a 200 ms worker,
the slow one gets work only when the fast one can't keep up. A worker that is overdue with a batch is not
trusted with a second. Its batch is sent once more, before anything that waits, if the budget of hedges
(hedging.py) and a free slot elsewhere allow it. The worker is probed first: if its connection is gone, the
batch may have killed it, and a hedge would only kill the next one without naming the guilty frame.

A full batch goes to a busy worker ahead of time, so that the device need not wait for it. But what has been
sent can't be overtaken: while frames of several priorities are about, it is sent only as long before the
worker falls idle as its way there takes, as measured.

Frames that the chosen worker could not finish before their deadline are ended as expired when they are
taken, and others go in their place. Without this an overload of equal deadlines lets every frame run a
little too late. If nothing else waits they are run: predictions may be wrong, and only runs correct them.

Suspects (frames that were with a worker when it was lost) run alone: one to a batch, on a worker that holds
nothing else and gets nothing else meanwhile, so that the next loss names the guilty frame. When no worker
is idle, the one that will be first is reserved for them; the others go on with everybody else's frames.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.broker.actions import Action, Report, SendBatch, SendHeartbeat, SendToWorker
from headrace.broker.batching import IDLE_LEAD_NS, ClassView, GiveWay, LookAgain
from headrace.broker.class_choice import Choice, Growing, choice_of, grow, instead, most_urgent
from headrace.broker.costs import CostTable
from headrace.broker.hedging import Hedges
from headrace.broker.inflight import InFlightBatch, Ledger
from headrace.broker.model_table import ModelTable, ServedClass
from headrace.broker.promotion import Promotion
from headrace.broker.records import End, FrameRecord, FrameState
from headrace.broker.recovery import Recovery
from headrace.broker.settings import CoreSettings
from headrace.broker.stream_table import StreamTable
from headrace.broker.trace import Story
from headrace.broker.traffic import Traffic
from headrace.broker.worker_pool import ClassPool, WorkerPools
from headrace.broker.worker_registry import Worker
from headrace.errors import Code
from headrace.protocol.messages import Compare, Status, Value

#: Waiting for a faster worker must save a quarter of the idle one's time, so that the noise of equal workers'
#: predictions leaves none of them idle.
WAIT_SHARE = 0.75

#: A batch is sent this many times its measured way to the worker before it is needed there: ways vary.
OVERHEAD_FACTOR = 2

#: ... and at least this long before: a turn of the broker's loop and the noise of the clock's wake-ups.
MIN_LEAD_NS = 500_000

#: ... and a batch that is not full at most this long: more would cost more in its size than the wait does.
MAX_LEAD_NS = 5_000_000

#: Between the probe of an overdue worker and the hedge: the shell tells within its turn whom it could not
#: reach, so any later turn will do.
PROBE_NS = 1_000_000


class Dispatcher:
    """Sends batches. Invariants: slots are never exceeded; a batch holds frames of one class, at most the
    class's and the worker's limit."""

    def __init__(
        self,
        settings: CoreSettings,
        models: ModelTable,
        costs: CostTable,
        ledger: Ledger,
        hedges: Hedges,
        streams: StreamTable,
        recovery: Recovery,
        traffic: Traffic,
        story: Story,
    ) -> None:
        limits = settings.limits
        self._models = models
        self._costs = costs
        self._ledger = ledger
        self._hedges = hedges
        self._streams = streams
        self._recovery = recovery
        self._traffic = traffic
        self._has_deadlines = settings.check_deadlines
        self._story = story
        self._max_frames = limits.max_frames_per_message
        self._max_bytes = limits.max_message_bytes - limits.max_header_bytes
        self._ageing_ns = settings.ageing_ms * 1_000_000
        self._debt_step = settings.ageing_share / (1.0 - settings.ageing_share)
        self._debt = 0.0
        self._promotion = Promotion(costs, self._max_frames, self._max_bytes)
        self.pools = WorkerPools()
        self._growing: dict[int, Growing] = {}  # by class, as last found
        self.look_again_ns: int | None = None

    def run(self, now_ns: int, actions: list[Action]) -> None:
        """Send everything that is to be sent now; leave in ``look_again_ns`` when to ask again."""
        self.look_again_ns = None
        for batch in self._hedges.candidates():
            self._hedge(batch, now_ns, actions)
        while True:
            while (choice := self._most_urgent(now_ns)) is not None:
                self._send(choice, now_ns, actions)
            if not self._end_reservations():
                return

    def _end_reservations(self) -> bool:
        """Give workers back that were reserved for suspects of which none wait any more."""
        has_ended = False
        for served in self._models.classes:
            reserved = self.pools.of(served).reserved
            if reserved is not None and not served.suspects:
                self.pools.unreserve(reserved)
                self.pools.touch(reserved)
                has_ended = True
        return has_ended

    def _most_urgent(self, now_ns: int) -> Choice | None:
        found: list[Choice | Growing] = []
        is_ready = False
        for served in self._models.classes:
            if served.suspects:
                choice = self._choose_suspect(served, now_ns)
                if choice is not None:
                    return choice
            if served.queue:
                one = self._choose(served, now_ns)
                if one is not None:
                    found.append(one)
                    is_ready = is_ready or (isinstance(one, Choice) and not one.is_growing)
        if not is_ready:
            return None
        choices = [grown for one in found if (grown := self._grown(one, now_ns)) is not None]
        best = most_urgent(choices, now_ns)
        if best is None:  # pragma: no cover - one of them is ready
            return None
        return self._age(best, min(choices, key=_since), now_ns)

    def _age(self, best: Choice, oldest: Choice, now_ns: int) -> Choice:
        """Return the class that is served: the most urgent one, unless its turn is owed to an aged one."""
        if oldest.pool is best.pool or oldest.oldest_ns + self._ageing_ns > now_ns:
            return best
        aged = instead(best, oldest)
        if aged is None or oldest.oldest_ns >= best.oldest_ns:
            return best
        if self._debt < 1.0:
            self._debt += self._debt_step * best.count
            return best
        self._debt -= aged.count
        return aged

    # -- suspects -----------------------------------------------------------------------------------

    def _choose_suspect(self, served: ServedClass, now_ns: int) -> Choice | None:
        pool = self.pools.of(served)
        worker = pool.best_idle()
        if worker is None and pool.reserved is not None and not pool.reserved.in_flight:
            worker = pool.reserved
        if worker is not None:
            return Choice(pool, worker, 1, is_alone=True)
        reserved = pool.reserved
        if reserved is not None and now_ns >= reserved.overdue_ns:
            # It may hang for ever: the suspects must not wait for that.
            self.pools.unreserve(reserved)
            self.pools.touch(reserved)
            reserved = None
        if reserved is None:
            reserved = pool.first_busy(now_ns)
            if reserved is None:
                return None
            self.pools.reserve(pool, reserved)
        self._look_again(reserved.overdue_ns, now_ns)
        return None

    # -- everybody else -----------------------------------------------------------------------------

    def _choose(self, served: ServedClass, now_ns: int) -> Choice | Growing | None:
        """Return the batch that a class could send now, None if it has none or no worker for it."""
        known = self._growing.get(served.index)
        if known is not None and known.still_grows(self.pools.version, len(served.queue), now_ns):
            self._look_again(known.until_ns, now_ns)
            return known
        pool = self.pools.of(served)
        idle = pool.best_idle()
        opened = pool.best_open(now_ns)
        candidate = idle or opened
        if candidate is None:
            return None
        if served.queue.has_exact:
            return self._choose_exact(pool, idle, opened, now_ns)
        if idle is not None and self._is_waiting_sooner(pool, idle, now_ns):
            candidate, idle = opened, None
            if candidate is None:
                return None
        view = self._view(pool, candidate, idle, opened, now_ns)
        decision = served.policy.decide(view, now_ns)
        if isinstance(decision, LookAgain):
            self._look_again(decision.at_ns, now_ns)
            if idle is not None:
                return None
            growing = grow(pool, candidate, view, decision.at_ns or now_ns, self.pools.version)
            self._growing[served.index] = growing
            return growing
        if isinstance(decision, GiveWay):
            self._look_again(decision.at_ns, now_ns)
        is_early = idle is None and self._is_early(candidate, now_ns)
        return choice_of(pool, candidate, view, decision, now_ns, is_growing=is_early)

    def _grown(self, one: Choice | Growing, now_ns: int) -> Choice | None:
        """Return the batch that a class would send if its worker fell idle now. Asked for only when another
        class has a batch ready for a slot: in most turns none has."""
        if isinstance(one, Choice):
            return one
        view = replace(self._view(one.pool, one.worker, None, one.worker, now_ns), has_idle_worker=True)
        decision = one.pool.served.policy.decide(view, now_ns)
        if isinstance(decision, LookAgain):
            return None
        if isinstance(decision, GiveWay):
            self._look_again(decision.at_ns, now_ns)
        return choice_of(one.pool, one.worker, view, decision, now_ns, is_growing=True)

    def _view(
        self, pool: ClassPool, candidate: Worker, idle: Worker | None, opened: Worker | None, now_ns: int
    ) -> ClassView:
        """Return what the policy of a class sees; what only some want to know costs only them."""
        served = pool.served
        queue, service = served.queue, pool.service(candidate)
        oldest_ns = queue.oldest_ns()
        view = ClassView(
            len(queue),
            now_ns if oldest_ns is None else oldest_ns,
            service.max_batch_size,
            idle is not None,
            True,
            None if opened is None else opened.busy_until_ns,
            _lead_ns(candidate),
            service.cost_ns,
        )  # by position: a view is made for every class that waits, in every turn
        if not served.policy.is_looking_ahead:
            return view
        count = min(view.waiting_count, view.max_batch_size)
        rivals_ns = [
            rival.cost_ns
            for rival in candidate.services.values()
            if rival is not service and rival.served.queue
        ]
        return replace(
            view,
            due_ns=queue.next_expiry_ns(),
            run_ns=self._costs.predict_ns(
                candidate.id, served.model, served.live_version, served.spec.name, count
            ),
            frames_per_ns=served.arrivals.frames_per_ns(queue.pushed_count, now_ns),
            rivals_ns=sum(rivals_ns) if rivals_ns else None,
        )

    def _is_early(self, busy: Worker, now_ns: int) -> bool:
        """True when a full batch can still wait for more urgent frames without the worker waiting for it."""
        if busy.overhead_ns is None or not self._traffic.is_mixed(now_ns):
            return False
        send_ns = busy.busy_until_ns - max(OVERHEAD_FACTOR * busy.overhead_ns, MIN_LEAD_NS)
        self._look_again(send_ns, now_ns)
        return now_ns < send_ns

    def _choose_exact(
        self, pool: ClassPool, idle: Worker | None, opened: Worker | None, now_ns: int
    ) -> Choice:
        queue = pool.served.queue
        workers = [worker for worker in (idle, opened) if worker is not None]
        while True:
            size = queue.exact_size()
            for worker in workers:
                if pool.service(worker).max_batch_size >= size:
                    return Choice(pool, worker, size, queue.urgency(now_ns), now_ns)
            # Half of a failed batch that none of the free workers can hold whole: smaller parts find the
            # guilty frame as well.
            records = queue.take(size, now_ns)
            part = pool.service(workers[0]).max_batch_size
            for start in range(0, size, part):
                queue.push_exact(records[start : start + part])

    def _is_waiting_sooner(self, pool: ClassPool, idle: Worker, now_ns: int) -> bool:
        """True when a busy worker is predicted to finish all that waits before this idle one would finish a
        first batch."""
        busy = pool.first_busy(now_ns)
        if busy is None:
            return False
        service = pool.service(busy)
        batches_count = -(-len(pool.served.queue) // service.max_batch_size)
        rounds = -(-batches_count // len(pool.workers))
        busy_finish_ns = max(busy.busy_until_ns, now_ns) + rounds * service.cost_ns
        if busy_finish_ns - now_ns >= WAIT_SHARE * pool.service(idle).cost_ns:
            return False
        # If the fast one turns out to hang, the slow one must not wait for it.
        self._look_again(busy.overdue_ns, now_ns)
        return True

    def _look_again(self, at_ns: int | None, now_ns: int) -> None:
        # A time that has come already asks for nothing: only an event can change the answer.
        if at_ns is not None and at_ns > now_ns:
            self.look_again_ns = at_ns if self.look_again_ns is None else min(self.look_again_ns, at_ns)

    # -- sending ------------------------------------------------------------------------------------

    def _send(self, choice: Choice, now_ns: int, actions: list[Action]) -> None:
        pool, worker = choice.pool, choice.worker
        served = pool.served
        is_alone = choice.is_alone
        is_exact = served.queue.has_exact
        records = [served.suspects.pop()] if is_alone else self._take_in_time(choice, now_ns, actions)
        if served.smaller and not is_alone and not is_exact:
            records += self._promotion.take(served, worker, records, now_ns)
        batch = self._open(worker, served, records, now_ns, is_alone=is_alone)
        served.batches_count += 1
        served.frames_count += len(records)
        self._hedges.earn(len(records))
        where = f"{batch.batch} at {worker.id}"
        for record in records:
            self._mark_sent(record, served, now_ns, where)
        self._append(batch, now_ns, actions)

    def _open(
        self, worker: Worker, served: ServedClass, records: list[FrameRecord], now_ns: int, *, is_alone: bool
    ) -> InFlightBatch:
        count = len(records)
        predicted_ns = self._costs.predict_ns(
            worker.id, served.model, served.live_version, served.spec.name, count
        )
        batch = self._ledger.open(worker, served, records, now_ns, predicted_ns, is_alone=is_alone)
        worker.batches_count += 1
        worker.frames_count += count
        worker.is_alone = is_alone
        worker.busy_until_ns = max(worker.busy_until_ns, now_ns) + predicted_ns
        batch.done_ns = worker.busy_until_ns
        batch.due_ns = batch.done_ns + self._hedges.patience_ns(predicted_ns)
        if len(worker.in_flight) == 1:
            worker.overdue_ns = batch.due_ns
        else:
            worker.overdue_ns = min(worker.overdue_ns, batch.due_ns)
        self._hedges.watch(batch)
        self.pools.touch(worker)
        return batch

    def _append(self, batch: InFlightBatch, now_ns: int, actions: list[Action]) -> None:
        worker, reload = batch.worker, batch.served.sampled_by
        is_plain = not batch.is_alone and not batch.is_hedge
        if reload is not None and is_plain and reload.takes_sample(worker, batch.predicted_ns, now_ns):
            actions.append(SendToWorker(worker.peer, Compare(batch.batch, reload.new_version)))
        actions.append(SendBatch(worker.peer, batch.message()))

    def _hedge(self, batch: InFlightBatch, now_ns: int, actions: list[Action]) -> None:
        """Send an overdue batch once more, if somebody has room for it and the budget allows it."""
        records = batch.unfinished
        count = len(records)
        if not self._hedges.can_afford(count):
            return
        pool = self.pools.of(batch.served)
        for worker in (pool.best_idle(), pool.best_open(now_ns)):
            if worker is not None and pool.service(worker).max_batch_size >= count:
                break
        else:
            return
        if not batch.was_probed:
            batch.was_probed = True
            actions.append(SendHeartbeat(batch.worker.peer, is_worker=True))
            self._look_again(now_ns + PROBE_NS, now_ns)
            return
        hedge = self._open(worker, batch.served, records, now_ns, is_alone=False)
        self._hedges.pair(batch, hedge)
        where = f"{hedge.batch} at {worker.id}, {batch.batch} at {batch.worker.id} is overdue"
        for record in records:
            record.attempt += 1
            record.batched_ns = now_ns
            self._story.note(now_ns, record, "hedged", where)
        self._append(hedge, now_ns, actions)
        values: dict[str, Value] = {
            "batch": batch.batch,
            "hedge": hedge.batch,
            "frames": count,
            "worker": batch.worker.id,
            "hedge_worker": worker.id,
            "running_ms": (now_ns - batch.sent_ns) // 1_000_000,
        }
        actions.append(Report("batch hedged", values))

    def _take_in_time(self, choice: Choice, now_ns: int, actions: list[Action]) -> list[FrameRecord]:
        """Take a batch's frames, and end those which the worker could not finish before their deadline."""
        served, worker = choice.pool.served, choice.worker
        is_checked = self._has_deadlines and not served.queue.has_exact
        records = self._take(served, choice.count, now_ns, [])
        while is_checked:
            start_ns = max(worker.busy_until_ns, now_ns)
            done_ns = start_ns + self._costs.predict_ns(
                worker.id, served.model, served.live_version, served.spec.name, len(records)
            )
            late = [r for r in records if r.deadline_ns is not None and r.deadline_ns < done_ns]
            if not late or (len(late) == len(records) and not served.queue):
                break
            served.expired_count += len(late)
            for record in late:
                late_ms = (done_ns - (record.deadline_ns or 0)) / 1e6
                message = f"it would have been done {late_ms:.1f} ms after its time to live"
                end = End(Status.EXPIRED, Code.DEADLINE, message)
                self._recovery.end_waiting(record, end, now_ns, actions)
            records = [r for r in records if r.state is FrameState.QUEUED]
            records += self._take(served, choice.count - len(records), now_ns, records)
        return records

    def _take(
        self, served: ServedClass, count: int, now_ns: int, held: list[FrameRecord]
    ) -> list[FrameRecord]:
        """Take frames from the queue that go with the held ones, at most as many as one message can carry to
        the worker: what is over goes back to the front. Large frames meet the bytes long before the batch
        limit."""
        queue = served.queue
        is_exact = queue.has_exact
        records = queue.take(count, now_ns)
        left_bytes = self._max_bytes - sum(record.nbytes for record in held)
        left_frames = self._max_frames - len(held)
        for index, record in enumerate(records):
            left_bytes -= record.nbytes
            if (index > 0 or held) and (left_bytes < 0 or index == left_frames):
                over = records[index:]
                del records[index:]
                if is_exact:
                    queue.push_exact(over)
                else:
                    for one in reversed(over):
                        queue.push_front(one, now_ns)
                break
        return records

    def _mark_sent(self, record: FrameRecord, served: ServedClass, now_ns: int, where: str) -> None:
        record.state = FrameState.IN_FLIGHT
        record.attempt += 1
        record.batched_ns = now_ns
        served.waste_sum += served.waste_of(record.frame.shape)
        stream = self._streams.by_name[record.frame.stream]
        if stream.latest is record:
            stream.latest = None
        self._story.note(now_ns, record, "batch", where)

    def settle(self, over: InFlightBatch, now_ns: int) -> None:
        """A batch has left its worker: predict anew when the ones sent after it will be done.

        Those sent before it keep their time: a cancelled batch may be answered while one before it hangs."""
        worker = over.worker
        worker.is_alone = False
        done_ns = now_ns
        for batch in worker.in_flight.values():
            if batch.batch > over.batch:
                batch.done_ns = done_ns + batch.predicted_ns
                batch.due_ns = batch.done_ns + self._hedges.patience_ns(batch.predicted_ns)
                self._hedges.watch(batch)
            done_ns = max(done_ns, batch.done_ns)
        worker.busy_until_ns = done_ns
        worker.overdue_ns = min((batch.due_ns for batch in worker.in_flight.values()), default=now_ns)
        self.pools.touch(worker)

    def learn(self, batch: InFlightBatch, count: int, ran_ns: int) -> None:
        """Take a measured run into the predictions."""
        worker, served = batch.worker, batch.served
        self._costs.observe(worker.id, served.model, batch.version, served.spec.name, count, ran_ns)
        service = worker.services.get(served.index)
        if service is not None:
            service.cost_ns = self._costs.predict_ns(
                worker.id, served.model, served.live_version, served.spec.name, service.max_batch_size
            )


def _since(choice: Choice) -> int:
    return choice.oldest_ns


def _lead_ns(worker: Worker) -> int:
    """Return how long before a worker falls idle a batch must be sent to be there in time."""
    if worker.overhead_ns is None:
        return IDLE_LEAD_NS
    return min(worker.overhead_ns + MIN_LEAD_NS, MAX_LEAD_NS)
