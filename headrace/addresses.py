"""Addresses of a broker: reading them, and finding all its sockets from any one of them.

A person gives one address; :func:`discover` asks there (message Discover) and gets all of them. Names
are looked up anew at each attempt and all their addresses are tried side by side, so that a broker
that moved to another machine is found again and ``localhost`` reaches a broker that listens on only
one of IPv4 and IPv6. What discover() returns are literal addresses: good for one connection, never to
be kept across a reconnect.

This module binds nothing and knows no roles; the option table of lasting sockets is in
``headrace.clients.sockets``.
"""

from __future__ import annotations

import contextlib

# getaddrinfo() imports this codec when it is first called, which is in a client's thread. A Ctrl-C that hits
# an import of the main thread can leave the import lock taken for good (a KeyboardInterrupt in importlib's
# _get_module_lock), and a thread that imports after that waits for ever.
import encodings.idna  # noqa: F401
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq

from headrace.errors import Code, ConfigError, RemoteError, RemoteProtocolError, UnreachableError
from headrace.protocol import codec
from headrace.protocol.messages import Discover, Endpoints, Limits, Refused

DEFAULT_PORT = 5555
MAX_PORT = 65535

#: sockaddr_un.sun_path of Linux holds 108 bytes, one of which ends the string.
MAX_IPC_PATH_BYTES = 107

#: How long the first attempt of a discovery waits for an answer. Each further one waits twice as
#: long, so that a slow link is given time and a broker that starts late is found soon.
FIRST_ATTEMPT_S = 0.5

#: How often a waiting discovery looks whether its caller wants it to stop.
STOP_CHECK_S = 0.05

_WILDCARDS = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - recognised here, never bound


@dataclass(frozen=True, slots=True)
class Address:
    """One address, checked. ``transport`` is "tcp" (with ``host`` and ``port``) or "ipc" (``path``).

    An IPv6 literal stands in ``host`` without brackets.
    """

    transport: str
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        """Return the address as ZeroMQ writes it."""
        if self.transport == "ipc":
            return f"ipc://{self.path}"
        return f"tcp://{bracketed(self.host)}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        return self.transport == "tcp" and self.host in _WILDCARDS


def parse(text: str, *, default_port: int = DEFAULT_PORT, for_binding: bool = False) -> Address:
    """Read ``HOST``, ``HOST:PORT``, ``tcp://HOST:PORT`` or ``ipc://PATH``.

    HOST is a name, an IPv4 address or an IPv6 address (in brackets when a port follows). With
    ``for_binding`` also a wildcard host (``*``, ``0.0.0.0``, ``[::]``) and port 0 (any free one).

    Raises ConfigError, which names the address, what is wrong with it and what would be right.
    """
    stripped = text.strip()
    transport, separator, rest = stripped.partition("://")
    if not separator:
        transport, rest = "tcp", stripped
    if transport == "ipc":
        return _parse_ipc(text, rest)
    if transport != "tcp":
        raise ConfigError(f"address {text!r}: transport {transport!r} is not tcp or ipc")
    host, port_text = _split_host_port(text, rest)
    port = default_port if port_text is None else _parse_port(text, port_text, for_binding=for_binding)
    if not for_binding and host in _WILDCARDS:
        raise ConfigError(f"address {text!r}: {host} can be bound but not connected to; name a host")
    return Address("tcp", host=host, port=port)


def normalise(text: str, *, default_port: int = DEFAULT_PORT) -> str:
    """Return the full form of a connectable address, such as ``tcp://cam-host:5555``."""
    return str(parse(text, default_port=default_port))


def bracketed(host: str) -> str:
    """Return the host as it stands in an address: IPv6 literals in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(text: str) -> bool:
    """Tell whether only this machine can reach the address. Of names only ``localhost`` counts."""
    address = parse(text, for_binding=True)
    if address.transport == "ipc" or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def check_ipc_path(path: str) -> None:
    """Raise ConfigError when the operating system would not take the path for an ipc socket."""
    length = len(path.encode())
    if length > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"address ipc://{path}: the path is {length} bytes long, the limit of the operating system"
            f" is {MAX_IPC_PATH_BYTES}; use a shorter folder"
        )


def reachable(address: str, host: str) -> str:
    """Return an address as bound by the broker with a wildcard host replaced by ``host``."""
    if not address:
        return address
    scheme, _, rest = address.partition("://")
    if scheme not in {"tcp", "http"}:
        return address
    bound_host, port_text = _split_host_port(address, rest.rstrip("/"))
    if bound_host not in _WILDCARDS:
        return address
    return f"{scheme}://{bracketed(host)}:{port_text}"


def reachable_endpoints(endpoints: Endpoints, reached: Address) -> Endpoints:
    """Return the endpoints with wildcard hosts replaced by the host that ``reached`` names."""
    host = reached.host if reached.transport == "tcp" else "127.0.0.1"
    return replace(
        endpoints,
        frames=reachable(endpoints.frames, host),
        intake=reachable(endpoints.intake, host),
        results=reachable(endpoints.results, host),
        workers=reachable(endpoints.workers, host),
        control=reachable(endpoints.control, host),
        http=reachable(endpoints.http, host),
    )


#: What ``localhost`` means, whatever a machine's table of hosts says.
LOOPBACKS = ("127.0.0.1", "::1")


def resolve(address: Address) -> tuple[Address, ...]:
    """Look the address's name up now; return each literal address it stands for, in given order.

    Raises OSError when the name has no address.
    """
    if address.transport == "ipc":
        return (address,)
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    hosts = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
    if address.host == "localhost":
        # Many machines name one family of it alone, and a broker may listen on the other (RFC 6761, 6.3).
        hosts |= dict.fromkeys(LOOPBACKS)
    return tuple(replace(address, host=host) for host in hosts)


def discover(
    address: str,
    timeout_s: float = 5.0,
    *,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Endpoints:
    """Ask the broker at ``address`` (any of its ROUTER sockets) for all its addresses.

    Returns endpoints with literal, connectable addresses. ``should_stop`` is asked several times a
    second; when it says yes the discovery ends as if the time were over.

    Raises ConfigError for an address that can't be read, UnreachableError when nothing answered in
    time, RemoteError when the peer refused or speaks another protocol version.
    """
    wanted = parse(address)
    deadline = time.monotonic() + timeout_s
    attempt_s = FIRST_ATTEMPT_S
    reason = ""
    while True:
        attempt_end = min(deadline, time.monotonic() + attempt_s)
        try:
            candidates = resolve(wanted)
        except OSError as error:
            candidates = ()
            reason = f": the name can't be looked up ({error.strerror or error})"
        endpoints = _ask(candidates, attempt_end, context or zmq.Context.instance(), should_stop)
        if endpoints is not None:
            return endpoints
        if time.monotonic() >= deadline or should_stop():
            raise UnreachableError(f"{wanted}: no broker answered within {timeout_s:.3g} s{reason}")
        if candidates:
            reason = ""
        attempt_s *= 2


def _ask(
    candidates: tuple[Address, ...],
    end: float,
    context: zmq.Context[zmq.Socket[bytes]],
    should_stop: Callable[[], bool],
) -> Endpoints | None:
    """Ask every candidate at once until ``end``; return the first answer."""
    poller = zmq.Poller()
    asked: dict[zmq.Socket[bytes], Address] = {}
    try:
        for candidate in candidates:
            dealer = context.socket(zmq.DEALER)
            asked[dealer] = candidate
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.IPV6, 1)
            dealer.setsockopt(zmq.MAXMSGSIZE, Limits().max_header_bytes)
            dealer.connect(str(candidate))
            # Not waiting: where a socket of another kind listens, ZeroMQ gives the connection up again and
            # again, and a send that comes between two tries waits, maybe for ever. Nothing there can answer.
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart(codec.encode(Discover()), zmq.NOBLOCK)
            poller.register(dealer, zmq.POLLIN)
        while not should_stop():
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                return None
            for dealer, _ in poller.poll(round(min(remaining_s, STOP_CHECK_S) * 1000)):
                endpoints = _read_answer(dealer)
                if endpoints is not None:
                    return reachable_endpoints(endpoints, asked[dealer])
        return None
    finally:
        for dealer in asked:
            dealer.close(linger=0)


def _read_answer(dealer: zmq.Socket[bytes]) -> Endpoints | None:
    """Return the endpoints, or None for anything that is not an answer of a broker. Raises RemoteError for a
    refusal, and for a broker of another protocol version."""
    parts = dealer.recv_multipart(zmq.NOBLOCK)
    try:
        message = codec.decode(parts, Limits())
    except RemoteProtocolError as error:
        if error.code == Code.BAD_VERSION:
            raise  # a broker that this release can't talk to, however often it asks
        # Something else listens there. It is not a broker; keep waiting for one on the others.
        return None
    if isinstance(message, Refused):
        raise RemoteError(message.code, message.message)
    return message if isinstance(message, Endpoints) else None


def _parse_ipc(text: str, path: str) -> Address:
    if not path:
        raise ConfigError(f"address {text!r}: the path is missing; write ipc:///run/headrace/frames")
    check_ipc_path(path)
    return Address("ipc", path=path)


def _split_host_port(text: str, rest: str) -> tuple[str, str | None]:
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")) or not _is_ipv6(host):
            raise ConfigError(f"address {text!r}: write an IPv6 address as [::1]:{DEFAULT_PORT}")
        return host, tail[1:] if tail else None
    if _is_ipv6(rest):
        return rest, None
    host, colon, port_text = rest.partition(":")
    if not host:
        raise ConfigError(f"address {text!r}: the host is missing; write HOST or HOST:PORT")
    if ":" in port_text or any(character.isspace() or character == "/" for character in host):
        raise ConfigError(f"address {text!r}: write HOST:PORT, or an IPv6 address as [::1]:{DEFAULT_PORT}")
    if host.isdigit():
        raise ConfigError(f"address {text!r}: a number alone is no host; write 127.0.0.1:{host}")
    return host, port_text if colon else None


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _parse_port(text: str, port_text: str, *, for_binding: bool) -> int:
    lowest = 0 if for_binding else 1
    if not (port_text.isascii() and port_text.isdigit()) or not lowest <= int(port_text) <= MAX_PORT:
        raise ConfigError(f"address {text!r}: port {port_text!r} is not a number from {lowest} to {MAX_PORT}")
    return int(port_text)
