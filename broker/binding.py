"""Bind the broker's five sockets: all of them or none.

Theory of operation. Addresses are planned first (which literal hosts, which ports), checked against the rule
that nothing is reachable from other machines unless ``insecure`` says so, and only then bound. Whatever fails
closes what was made before and becomes a ConfigError that names the address and the remedy.

``localhost`` binds both 127.0.0.1 and ::1, as clients may resolve it to either. A wildcard host binds both
families. An ipc path is looked at before ZeroMQ sees it, since ZeroMQ deletes whatever lies there: the socket
of a living broker, or a file of yours.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket as os_socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq

from headrace import addresses
from headrace.broker.port_owner import describe_listener
from headrace.broker.shell_settings import ShellSettings, check
from headrace.broker.sockets import Context, Role, Socket, make_socket
from headrace.errors import ConfigError

_LOCALHOST = ("127.0.0.1", "::1")

#: With port 0 and two hosts the port that one host gave may be taken on the other. Each try has a new port.
_PORT_TRIES = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """Where one socket is to be bound: ``hosts`` are literal, or ``*``; an ipc plan has a path instead."""

    role: Role
    key: str
    text: str
    hosts: tuple[str, ...] = ()
    port: int = 0
    path: str = ""


@dataclass(slots=True)
class BoundSockets:
    """The sockets by role and the address each was bound to. Owner: the thread that made it."""

    context: Context
    by_role: dict[Role, Socket] = field(default_factory=dict)
    addresses: dict[Role, str] = field(default_factory=dict)
    ipc_paths: list[Path] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all sockets; waits up to their linger for what is still queued to living peers."""
        self._close(linger_ms=None)

    def abandon(self) -> None:
        """Close all sockets at once; what is still queued is lost."""
        self._close(linger_ms=0)

    def _close(self, linger_ms: int | None) -> None:
        # ZeroMQ leaves the files of ipc sockets behind. They go while we still listen: from then on a new
        # broker that binds the path has a file of its own, which is not ours to delete.
        for path in self.ipc_paths:
            path.unlink(missing_ok=True)
        for socket in self.by_role.values():
            socket.close(linger_ms)
        self.context.term()


def bind_sockets(settings: ShellSettings) -> BoundSockets:
    """Make and bind every socket. Raises ConfigError and leaves nothing open when one can't be."""
    check(settings)
    plans = [_plan(role, settings) for role in Role]
    bound = BoundSockets(zmq.Context())
    try:
        for plan in plans:
            socket = make_socket(bound.context, plan.role, settings)
            bound.by_role[plan.role] = socket
            bound.addresses[plan.role] = _bind_ipc(socket, plan) if plan.path else _bind_tcp(socket, plan)
            if plan.path and not plan.path.startswith("@"):
                bound.ipc_paths.append(Path(plan.path))
    except BaseException:
        bound.abandon()
        raise
    return bound


def refuse_exposed(key: str, text: str, hosts: tuple[str, ...], *, is_insecure: bool) -> None:
    """Raise ConfigError when a host can be reached from other machines and nobody allowed that."""
    exposed = [host for host in hosts if not _is_loopback(host)]
    if exposed and not is_insecure:
        raise ConfigError(
            f"{key} = {text!r}: {exposed[0]} can be reached from other machines and peers are not"
            " authenticated; use 127.0.0.1, or allow it with broker.insecure = true (--insecure)"
        )


def resolve_hosts(key: str, host: str) -> tuple[str, ...]:
    """Return the literal addresses to bind: both families for localhost, ``*`` for any wildcard."""
    if host == "localhost":
        return _LOCALHOST
    if host in {"*", "::"}:
        return ("*",)
    with contextlib.suppress(ValueError):
        return (str(ipaddress.ip_address(host)),)
    try:
        found = os_socket.getaddrinfo(host, None, type=os_socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{key} = {host!r}: this name has no address ({error.strerror})") from error
    return tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def is_exposed(bound: BoundSockets) -> bool:
    """Tell whether any bound address can be reached from other machines."""
    return not all(addresses.is_loopback(address) for address in bound.addresses.values())


def _plan(role: Role, settings: ShellSettings) -> Plan:
    offset = list(Role).index(role)
    default_port = settings.port + offset if settings.port else 0
    own: str = getattr(settings, role.value)
    if own:
        key, text = f"broker.{role.value}", own
        address = addresses.parse(own, default_port=addresses.DEFAULT_PORT + offset, for_binding=True)
        if address.transport == "ipc":
            return Plan(role, key, text, path=address.path)
        host, port = address.host, address.port
    else:
        key, text, host, port = "broker.host", settings.host, settings.host, default_port
    hosts = resolve_hosts(key, host)
    refuse_exposed(key, text, hosts, is_insecure=settings.insecure)
    return Plan(role, key, text, hosts=hosts, port=port)


def _is_loopback(host: str) -> bool:
    return host != "*" and ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _bind_tcp(socket: Socket, plan: Plan) -> str:
    """Bind every host of the plan to one port; return the first one's address."""
    for attempt in range(_PORT_TRIES):
        first_endpoint, port = "", plan.port
        for host in plan.hosts:
            try:
                socket.bind(f"tcp://{addresses.bracketed(host)}:{port or '*'}")
            except zmq.ZMQError as error:
                if first_endpoint and _is_family_missing(error):
                    continue
                is_unlucky = first_endpoint and not plan.port and error.errno == errno.EADDRINUSE
                if is_unlucky and attempt + 1 < _PORT_TRIES:
                    socket.unbind(first_endpoint)
                    break
                raise _bind_error(plan, host, port, error) from error
            if not first_endpoint:
                first_endpoint = _last_endpoint(socket)
                port = int(first_endpoint.rpartition(":")[2])
        else:
            # Not ZeroMQ's own wording, which is [::ffff:127.0.0.1] for 127.0.0.1 on a socket that can do
            # IPv6.
            return f"tcp://{addresses.bracketed(plan.hosts[0])}:{port}"
    raise AssertionError("unreachable: the last try returns or raises")


def _is_family_missing(error: zmq.ZMQError) -> bool:
    return error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV}


def _bind_error(plan: Plan, host: str, port: int, error: zmq.ZMQError) -> ConfigError:
    where = f"the {plan.role.value} socket can't be bound to {addresses.bracketed(host)}:{port}"
    if error.errno == errno.EADDRINUSE:
        owner = describe_listener(port)
        held = f" by {owner}" if owner else ""
        return ConfigError(
            f"{plan.key} = {plan.text!r}: {where}: port {port} is taken{held}; choose another port"
        )
    if _is_family_missing(error):
        return ConfigError(f"{plan.key} = {plan.text!r}: {where}: this machine has no such address")
    return ConfigError(f"{plan.key} = {plan.text!r}: {where}: {error.strerror}")


def _bind_ipc(socket: Socket, plan: Plan) -> str:
    _check_ipc_place(plan)
    try:
        socket.bind(f"ipc://{plan.path}")
    except zmq.ZMQError as error:
        raise ConfigError(f"{plan.key} = {plan.text!r}: can't be bound: {error.strerror}") from error
    return _last_endpoint(socket)


def _check_ipc_place(plan: Plan) -> None:
    if plan.path.startswith("@"):
        return  # Linux's abstract namespace: no file
    path = Path(plan.path)
    if not path.parent.is_dir():
        raise ConfigError(f"{plan.key} = {plan.text!r}: the folder {path.parent} does not exist; create it")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"{plan.key} = {plan.text!r}: a file that is not a socket lies there; choose another path"
        )
    with os_socket.socket(os_socket.AF_UNIX, os_socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        with contextlib.suppress(ConnectionRefusedError):  # nobody listens: left over by a killed broker
            probe.connect(plan.path)
            raise ConfigError(
                f"{plan.key} = {plan.text!r}: another process listens there; choose another path"
            )


def _last_endpoint(socket: Socket) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    return endpoint.rstrip(b"\0").decode() if isinstance(endpoint, bytes) else str(endpoint)
