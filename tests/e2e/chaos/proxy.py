"""A TCP proxy with faults: each peer reaches the broker through an address of its own, its link.

A link listens at its own loopback host, on the ports of the broker, and relays to the broker's host. Peers
learn the broker's addresses from the broker, so the link writes its own host over the broker's in what the
broker says; both have the same length. An address that is split over two reads stays as it is: that one
connection then goes past the proxy, which no check minds.

Faults of a link, each until ``heal``: ``delay`` holds all bytes back for a time, ``throttle`` limits the
rate, ``swallow`` takes everything and passes nothing on without a word (a power cut), ``cut`` closes what is
connected and refuses what comes. A connection that has swallowed bytes is closed when it heals, since what
follows a hole would be nonsense.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

CHUNK_BYTES = 64 * 1024

#: Chunks on their way through a slow link; beyond that the sender has to wait, as on a real one.
MAX_CHUNKS = 64

CONNECT_TIMEOUT_S = 5.0


class Link:
    """One peer's way to the broker. The faults are set in the proxy's thread only."""

    def __init__(self, name: str, host: str, broker_host: str) -> None:
        if len(host) != len(broker_host):
            raise ValueError(
                f"{host} and {broker_host} differ in length: one can't be written over the other"
            )
        self.name = name
        self.host = host
        self.broker_host = broker_host
        self.relayed_bytes = 0
        self.cut_count = 0
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.is_cut = False
        self.is_swallowing = False
        self._has_hole = False
        self._writers: set[asyncio.StreamWriter] = set()

    def set_fault(self, kind: str, value: float) -> None:
        """Begin a fault: ``delay`` (value in s), ``throttle`` (bytes/s), ``cut`` or ``swallow``."""
        match kind:
            case "delay":
                self.delay_s = value
            case "throttle":
                self.bytes_per_s = value
            case "swallow":
                self.is_swallowing = True
            case "cut":
                self.is_cut = True
                self._close_all()
            case _:
                raise ValueError(f"no fault {kind}")

    def heal(self) -> None:
        """End all faults."""
        self.delay_s = 0.0
        self.bytes_per_s = None
        self.is_cut = False
        self.is_swallowing = False
        if self._has_hole:
            self._has_hole = False
            self._close_all()

    def _close_all(self) -> None:
        self.cut_count += bool(self._writers)
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def relay(
        self, near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter, port: int
    ) -> None:
        """Serve one connection to its end."""
        self._writers.add(near_writer)
        far_writer: asyncio.StreamWriter | None = None
        try:
            if self.is_cut:
                return
            far_reader, far_writer = await asyncio.wait_for(
                asyncio.open_connection(self.broker_host, port), CONNECT_TIMEOUT_S
            )
            self._writers.add(far_writer)
            if self.is_cut:
                return
            ways = {
                asyncio.ensure_future(self._pump(near_reader, far_writer, is_from_broker=False)),
                asyncio.ensure_future(self._pump(far_reader, near_writer, is_from_broker=True)),
            }
            # TCP's half-closed state is of no use to ZeroMQ: one end gone is the connection gone.
            _, others = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                other.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, TimeoutError):
            pass
        finally:
            for writer in (near_writer, far_writer):
                if writer is not None:
                    self._writers.discard(writer)
                    writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_from_broker: bool
    ) -> None:
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
        sender = asyncio.ensure_future(self._send(chunks, writer))
        loop = asyncio.get_running_loop()
        old, new = f"tcp://{self.broker_host}:".encode(), f"tcp://{self.host}:".encode()
        try:
            while data := await reader.read(CHUNK_BYTES):
                if self.is_swallowing:
                    self._has_hole = True
                    continue
                if is_from_broker:
                    data = data.replace(old, new)
                self.relayed_bytes += len(data)
                await chunks.put((loop.time() + self.delay_s, data))
                if sender.done():
                    return
        except OSError:
            pass
        finally:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sender

    async def _send(self, chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s, data = await chunks.get()
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if self.bytes_per_s is not None:
                await asyncio.sleep(len(data) / self.bytes_per_s)
            writer.write(data)
            await writer.drain()


class Proxy:
    """All links, served by one thread. A context manager: leaving it closes everything."""

    def __init__(self, broker_host: str, ports: list[int]) -> None:
        self._broker_host = broker_host
        self._ports = ports
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self.links: dict[str, Link] = {}

    def add(self, name: str, host: str) -> Link:
        """Open a link at ``host`` on each of the broker's ports."""
        link = self.links[name] = Link(name, host, self._broker_host)
        self._call(self._listen(link))
        return link

    def set_fault(self, name: str, kind: str, value: float = 0.0) -> None:
        self._loop.call_soon_threadsafe(self.links[name].set_fault, kind, value)

    def heal(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self.links[name].heal)

    async def _listen(self, link: Link) -> None:
        for port in self._ports:

            async def relay(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port
            ) -> None:
                await link.relay(reader, writer, port)

            server = await asyncio.start_server(
                relay, link.host, port, family=socket.AF_INET, reuse_address=True
            )
            self._servers.append(server)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """Close every connection and listener. Idempotent."""
        if self._thread.is_alive():
            self._call(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
        if not self._loop.is_running():
            self._loop.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
