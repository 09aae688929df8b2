"""A chaos run: start everything, let the schedule loose, heal, drain, stop, check.

The broker listens at one loopback host; every other process reaches it through a link of its own at another
(``proxy``). After the last fault all is healed and must come to rest by itself: producers owe nothing,
the broker has nothing unfinished, subscribers have all there is. Only then the processes are stopped, each
by SIGTERM, and the files are checked (``checks``).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos import checks
from chaos.processes import Member
from chaos.proxy import Link, Proxy
from chaos.schedule import Fault, plan
from headrace import Control
from headrace.errors import HeadraceError

COUNTS = {"broker": 1, "worker": 3, "producer": 4, "subscriber": 3}

#: 127.0.0.0/8 is loopback as a whole on Linux, so each link has a host of its own and the broker's ports.
BROKER_HOST = "127.0.0.10"
FIRST_LINK_HOST = 11

#: Budgets small enough that a run of a minute meets them.
ADMISSION_BYTES = 8 * 2**20
RETENTION_BYTES = 16 * 2**20
MEMORY_SHARE = 1.2

#: Time between the last fault and the stop: everything must work again, not only end.
HEALTHY_S = 4.0
START_LIMIT_S = 60.0
STOP_LIMIT_S = 75.0
SAMPLE_S = 0.25

#: Exit codes that a frame marked ``abort`` gives its worker (SIGABRT).
POISON_DEATHS = frozenset({-6})

#: A worker comes back under its name before the broker has buried the one before: it is told so and ends
#: (78). Its supervisor, here us, tries again.
REFUSED_ID = 78

CONFIG = f"""
[broker]
host = "{BROKER_HOST}"
port = 0
http = false
heartbeat_ms = 300
grace_ms = 5000
results_queue_messages = 500
[admission]
max_bytes = {ADMISSION_BYTES}
credits_per_producer = 48
max_queued_per_stream = 64
[queues]
max_queue_size = 256
[retention]
frames_per_stream = 4000
max_bytes = {RETENTION_BYTES}
[worker]
grace_ms = 3000
[shm]
folder = "SHM_FOLDER"
[[models]]
name = "m"
adapter = "hr_fault_hooks:answer"
[models.image]
[models.emulated]
base_ms = 4
per_frame_ms = 1
[[models.size_classes]]
name = "small"
height = 32
width = 48
max_batch_size = 8
[[models.size_classes]]
name = "large"
height = 64
width = 96
max_batch_size = 4
"""


class Chaos:
    """One run. Leaving the block reaps every process and closes the proxy."""

    def __init__(self, folder: Path, seed: int, seconds: float) -> None:
        self.folder = folder
        self.seed = seed
        self.seconds = seconds
        self.config = folder / "broker.toml"
        self.shm = folder / "shm"
        self.shm.mkdir(exist_ok=True)
        self._text = CONFIG.replace("SHM_FOLDER", str(self.shm.resolve()))
        self.config.write_text(self._text)
        self.members = {
            (role, number): Member(role, number, folder)
            for role, count in COUNTS.items()
            for number in range(count)
        }
        self.broker = self.members["broker", 0]
        self.done: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.memory_bytes = 0
        self.idle_memory_bytes = 0
        self.idle_descriptors = 0
        self.final_descriptors = 0
        self.broker_ready_ns = 0
        self.faults: list[str] = []
        self._endpoints: dict[str, str] = {}
        self._proxy: Proxy | None = None
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._clock = threading.Event()  # never set: only waited on
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *_exc: object) -> None:
        for member in self.members.values():
            member.kill()
        self._stack.close()

    # -- the whole -----------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Return the report; ``failures`` in it is empty when all is well."""
        began_s = time.monotonic()
        self._start_all()
        self._let_loose()
        self._heal()
        final = self._drain()
        producers = [checks.read_producer(*each) for each in self._logs("producer")]
        subscribers = [
            checks.read_subscriber(name, text, self._prefix(int(name.split("-")[1].split(".")[0])))
            for name, text in self._logs("subscriber")
        ]
        if final is not None:
            self.faults += checks.check_all(producers, subscribers, final)
        self.faults += self._check_resources()
        self.faults += self._check_logs()
        return self._report(producers, subscribers, final, time.monotonic() - began_s)

    # -- starting ------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        self._start(self.broker)
        self._wait(self._is_broker_ready, START_LIMIT_S, "the broker to be ready")
        self._endpoints = json.loads((self.folder / "ready.json").read_text())["endpoints"]
        self._pin_addresses()
        self.idle_memory_bytes = self.broker.memory_bytes()
        self.idle_descriptors = self.broker.descriptor_count()
        ports = [
            int(self._endpoints[name].rpartition(":")[2])
            for name in ("frames", "results", "workers", "control")
        ]
        self._proxy = self._stack.enter_context(Proxy(BROKER_HOST, ports))
        peers = [member for member in self.members.values() if member is not self.broker]
        for host, member in enumerate(peers, start=FIRST_LINK_HOST):
            self._proxy.add(member.name, f"127.0.0.{host}")
            self._start(member)
        self._wait(lambda: self._ready_workers() == COUNTS["worker"], START_LIMIT_S, "the workers")

    def _pin_addresses(self) -> None:
        """Have every later broker listen where the first one does."""
        lines = [
            f'{name} = "{self._endpoints[name]}"'
            for name in ("frames", "intake", "results", "workers", "control")
        ]
        self.config.write_text(self._text.replace("port = 0", "\n".join(lines), 1))

    def _start(self, member: Member) -> None:
        member.lives += 1
        parent = ["--parent-pid", os.getpid()]
        match member.role:
            case "broker":
                ready = self.folder / "ready.json"
                ready.unlink(missing_ok=True)
                member.start(["headrace", "broker", "--config", self.config, "--ready-file", ready, *parent])
            case "worker":
                name = ["--id", member.name] if member.number else []
                device = ["--device", "emulated", "--config", self.config]
                member.start(
                    ["headrace", "worker", "--connect", self._address(member), *device, *name, *parent]
                )
            case "producer":
                seed = f"{self.seed}/{member.name}/{member.lives}"
                options: list[object] = ["--seed", seed, "--shm-folder", self.shm.resolve()]
                member.start(["chaos.roles", "producer", *self._role_options(member), *options])
            case "subscriber":
                prefix = self._prefix(member.number)
                options = ["--prefix", prefix] if prefix else []
                options += ["--pause-ms", 4 if member.number == 2 else 0]
                member.start(["chaos.roles", "subscriber", *self._role_options(member), *options])

    def _role_options(self, member: Member) -> list[object]:
        return [
            "--name", member.name, "--connect", self._address(member), "--log", member.log,
            "--parent-pid", os.getpid(),
        ]  # fmt: skip

    def _address(self, member: Member) -> str:
        assert self._proxy is not None
        port = self._endpoints["frames"].rpartition(":")[2]
        return f"tcp://{self._proxy.links[member.name].host}:{port}"

    @staticmethod
    def _prefix(number: int) -> str:
        """One subscriber reads half of the streams, the others all."""
        return "producer-1/" if number == 1 else ""

    def _is_broker_ready(self) -> bool:
        if self.broker.has_died():
            raise RuntimeError(
                f"the broker ended with {self.broker.deaths[-1]}: {self.broker.errors.read_text()}"
            )
        return (self.folder / "ready.json").exists()

    def _ready_workers(self) -> int:
        status = self._status()
        return sum(worker["state"] == "ready" for worker in status["workers"]) if status else 0

    def _status(self) -> dict[str, Any] | None:
        try:
            with Control(self._endpoints["frames"], timeout=3.0) as control:
                return control.status()
        except HeadraceError:
            return None

    # -- faults --------------------------------------------------------------------------------------

    def _let_loose(self) -> None:
        began_s = time.monotonic()
        for fault in plan(self.seed, self.seconds, COUNTS):
            self._later(began_s + fault.at_s, lambda fault=fault: self._begin(fault))
        self._run_until(began_s + self.seconds)

    def _begin(self, fault: Fault) -> None:
        member = self.members[fault.role, fault.number]
        if fault.kind == "kill":
            self._kill(member, fault.for_s)
        elif fault.kind == "pause":
            self._pause(member, fault.for_s)
        else:
            assert self._proxy is not None
            self._proxy.set_fault(member.name, fault.kind, fault.value)
            self.done[fault.kind] += 1
            self._later(time.monotonic() + fault.for_s, lambda: self._proxy.heal(member.name))  # type: ignore[union-attr]

    def _kill(self, member: Member, for_s: float) -> None:
        if not member.is_up:
            self.skipped["kill"] += 1
            return
        self._sample()
        member.kill()
        self.kills[member.role] += 1
        self._later(time.monotonic() + for_s, lambda: self._bring_back(member))

    def _bring_back(self, member: Member) -> None:
        if not member.is_up:
            self._start(member)

    def _pause(self, member: Member, for_s: float) -> None:
        if not member.is_up or member.is_paused:
            self.skipped["pause"] += 1
            return
        member.pause()
        self.done["pause"] += 1
        life = member.lives
        self._later(time.monotonic() + for_s, lambda: member.resume() if member.lives == life else None)

    def _later(self, at_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), work))

    def _run_until(self, end_s: float) -> None:
        while (now_s := time.monotonic()) < end_s:
            while self._due and self._due[0][0] <= now_s:
                heapq.heappop(self._due)[2]()
            self._sample()
            next_s = min(end_s, self._due[0][0] if self._due else end_s)
            self._clock.wait(max(0.0, min(SAMPLE_S, next_s - time.monotonic())))

    def _sample(self) -> None:
        """Measure the broker; notice who has died, and start it again."""
        if self.broker.is_up:
            self.memory_bytes = max(self.memory_bytes, self.broker.memory_bytes())
        for member in self.members.values():
            if member.has_died():
                self._judge_death(member)
                self._later(time.monotonic() + 0.5, lambda member=member: self._bring_back(member))

    def _judge_death(self, member: Member) -> None:
        code = member.deaths[-1]
        if member.role == "worker" and code in POISON_DEATHS:
            self.done["poison_death"] += 1
        elif member.role == "worker" and code == REFUSED_ID:
            self.done["refused_id"] += 1
        else:
            self.faults.append(f"{member.name} ended by itself with {code} in life {member.lives}")

    # -- the end -------------------------------------------------------------------------------------

    def _heal(self) -> None:
        assert self._proxy is not None
        self._due.clear()
        for member in self.members.values():
            member.resume()
            self._proxy.heal(member.name) if member is not self.broker else None
            self._bring_back(member)
        self._wait(self._is_whole, START_LIMIT_S, "all to be connected after the last fault")
        self.broker_ready_ns = time.monotonic_ns()
        self._run_until(time.monotonic() + min(HEALTHY_S, self.seconds / 4))
        # A frame that kills its worker may just have come: it counts, and must not look like a failed stop.
        self._wait(self._is_whole, START_LIMIT_S, "all to be connected before the end")

    def _is_whole(self) -> bool:
        self._run_until(time.monotonic() + SAMPLE_S)
        status = self._status()
        if status is None:
            return False
        ready = sum(worker["state"] == "ready" for worker in status["workers"])
        return ready == COUNTS["worker"] and len(status["producers"]) == COUNTS["producer"]

    def _drain(self) -> checks.FinalStatus | None:
        """Stop each role by SIGTERM in the order of the flow; return what the broker says at its end."""
        self._stop("producer")
        is_idle = self._wait(lambda: self._unfinished() == 0, STOP_LIMIT_S, "the broker to finish all frames")
        status = self._status() if is_idle else None
        self._stop("subscriber")
        self._stop("worker")
        self._sample()
        assert self._proxy is not None
        self._proxy.close()
        if self.broker.is_up:
            self._wait(self._has_no_descriptor_too_many, 10.0, "the broker to close its descriptors")
            self.final_descriptors = self.broker.descriptor_count()
        self._stop("broker")
        if status is None:
            return None
        streams = {name: stream["next_pub_seq"] for name, stream in status["streams"].items()}
        return checks.FinalStatus(status["boot"], status["account"], streams, self.broker_ready_ns)

    def _unfinished(self) -> int:
        self._sample()
        status = self._status()
        return -1 if status is None else int(status["account"]["unfinished"])

    def _has_no_descriptor_too_many(self) -> bool:
        return self.broker.descriptor_count() <= self.idle_descriptors

    def _stop(self, role: str) -> None:
        members = [member for member in self.members.values() if member.role == role and member.is_up]
        for member in members:
            member.ask_to_stop()
        deadline_s = time.monotonic() + STOP_LIMIT_S
        for member in members:
            code = member.wait(max(0.1, deadline_s - time.monotonic()))
            if role == "worker" and code in POISON_DEATHS:
                continue
            if code != 0:
                what = "did not end" if code is None else f"ended with {code}"
                self.faults.append(f"{member.name} {what} when it was stopped")

    def _wait(self, condition: Callable[[], bool], limit_s: float, what: str) -> bool:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                self.faults.append(f"waited {limit_s:g} s in vain for {what}")
                return False
            self._clock.wait(0.05)
        return True

    # -- judging -------------------------------------------------------------------------------------

    def _logs(self, role: str) -> list[tuple[str, str]]:
        return [
            (f"{member.name}.{life}", member.log_of(life).read_text())
            for member in self.members.values()
            if member.role == role
            for life in range(1, member.lives + 1)
            if member.log_of(life).exists()
        ]

    def _links(self) -> list[Link]:
        return list(self._proxy.links.values()) if self._proxy is not None else []

    def _check_resources(self) -> list[str]:
        faults = []
        faults += [
            f"nothing went through the link of {link.name}"
            for link in self._links()
            if not link.relayed_bytes
        ]
        allowed = (ADMISSION_BYTES + RETENTION_BYTES) * MEMORY_SHARE
        grown = self.memory_bytes - self.idle_memory_bytes
        if grown > allowed:
            faults.append(f"the broker grew by {grown / 2**20:.1f} MiB; {allowed / 2**20:.1f} are allowed")
        if self.final_descriptors > self.idle_descriptors:
            faults.append(
                f"{self.final_descriptors} descriptors at the end, {self.idle_descriptors} when idle"
            )
        left = sorted(path.name for path in self.shm.iterdir())
        if left:
            faults.append(f"shared memory is left: {', '.join(left)}")
        return faults

    def _check_logs(self) -> list[str]:
        faults = []
        for member in self.members.values():
            text = member.errors.read_text(errors="replace") if member.errors.exists() else ""
            # The marked frames that make the adapter raise are logged with a traceback, as they should.
            found = text.count("Traceback") - text.count("ValueError: this frame is marked")
            if found > 0:
                faults.append(f"{found} tracebacks in {member.errors.name}")
        return faults

    def _report(
        self,
        producers: list[checks.ProducerLife],
        subscribers: list[checks.SubscriberLife],
        final: checks.FinalStatus | None,
        took_s: float,
    ) -> dict[str, Any]:
        seen = [item for life in subscribers for item in life.items if isinstance(item, checks.Seen)]
        missed = [item for life in subscribers for item in life.items if isinstance(item, checks.Missed)]
        codes = [code for life in producers for _, code in life.finished]
        return {
            "seed": self.seed,
            "seconds": round(took_s, 1),
            "kills": self.kills.total(),
            "kills_by_role": dict(self.kills),
            "other_faults": dict(self.done),
            "skipped": dict(self.skipped),
            "account": final.account if final is not None else None,
            "frames_pushed": sum(len(life.pushed) for life in producers),
            "frames_concluded": sum(len(life.finished) for life in producers),
            "rejected_by_code": dict(Counter(code for code in codes if code != "-")),
            "outcomes_seen": len(seen),
            "outcomes_by_status": dict(Counter(item.status for item in seen)),
            "errors_by_code": dict(Counter(item.code for item in seen if item.status == "error")),
            "missed_ranges": len(missed),
            "missed_outcomes": sum(item.last - item.first + 1 for item in missed if item.last is not None),
            "second_runs": sum(life.items[-1].duplicates for life in subscribers if life.items),
            "broker_lives": self.broker.lives,
            "relayed_mib": round(sum(link.relayed_bytes for link in self._links()) / 2**20, 1),
            "connections_cut": sum(link.cut_count for link in self._links()),
            "broker_mib": {
                "idle": round(self.idle_memory_bytes / 2**20, 1),
                "peak": round(self.memory_bytes / 2**20, 1),
                "budget": (ADMISSION_BYTES + RETENTION_BYTES) // 2**20,
            },
            "descriptors": {"idle": self.idle_descriptors, "end": self.final_descriptors},
            "failures": self.faults,
        }  # fmt: skip


def run(folder: Path, seed: int, seconds: float) -> dict[str, Any]:
    """Run one chaos run in a folder; return its report."""
    sys.stderr.write(f"chaos: seed {seed}, {seconds:g} s of faults, files in {folder}\n")
    with Chaos(folder, seed, seconds) as chaos:
        return chaos.run()
