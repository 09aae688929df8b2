"""Where the broker listens: all sockets or none, loopback unless told otherwise."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from headrace.broker.binding import BoundSockets, Plan, _bind_tcp, bind_sockets, is_exposed, resolve_hosts
from headrace.broker.settings import CoreSettings
from headrace.broker.shell_settings import ShellSettings
from headrace.broker.sockets import Role
from headrace.errors import ConfigError

CORE = CoreSettings(models=())


def settings(**fields: object) -> ShellSettings:
    return ShellSettings(core=CORE, **({"port": 0} | fields))  # type: ignore[arg-type]


@contextlib.contextmanager
def bound_sockets(**fields: object) -> Iterator[BoundSockets]:
    with bind_sockets(settings(**fields)) as bound:
        yield bound


def can_reach(address: str) -> bool:
    """Tell whether something accepts connections there."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5):
        return True
    return False


def ipc_path(folder: Path, length: int) -> str:
    """Return a path in the folder that is exactly so many bytes long."""
    return f"{folder}/{'x' * (length - len(os.fsencode(folder)) - 1)}"


def test_by_default_only_loopback_listens() -> None:
    """SEC-02: without a word about it no other machine can reach a socket."""
    with bound_sockets() as bound:
        assert not is_exposed(bound)
        for address in bound.addresses.values():
            assert address.startswith("tcp://127.0.0.1:")
            assert can_reach(address)


@pytest.mark.parametrize(
    ("host", "named"), [("*", r"\*"), ("0.0.0.0", "0.0.0.0"), ("::", r"\*"), ("192.0.2.7", "192.0.2.7")]
)
def test_a_wider_host_needs_an_explicit_word(host: str, named: str) -> None:
    """SEC-02: the refusal names the key, the address and both remedies."""
    with pytest.raises(ConfigError, match=rf"broker.host = .*{named} can be reached.*insecure = true"):
        bind_sockets(settings(host=host))


def test_one_wider_address_needs_an_explicit_word() -> None:
    """SEC-02: the rule holds for the address of a single socket too."""
    with pytest.raises(ConfigError, match=r"broker\.results = .tcp://0\.0\.0\.0:0"):
        bind_sockets(settings(results="tcp://0.0.0.0:0"))


@pytest.mark.parametrize(
    ("host", "reachable"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("::1", ["::1"]),
        ("localhost", ["127.0.0.1", "::1"]),
        ("*", ["127.0.0.1", "::1"]),
        ("0.0.0.0", ["127.0.0.1"]),
    ],
)
def test_every_way_to_name_this_machine_can_be_bound(host: str, reachable: list[str]) -> None:
    """ZMQ-17: IPv6 literals, localhost (both families) and wildcards start and can be reached."""
    with bound_sockets(host=host, insecure=True) as bound:
        for address in bound.addresses.values():
            port = address.rpartition(":")[2]
            for name in reachable:
                assert can_reach(f"tcp://{name}:{port}"), f"{name} does not reach {address}"


def test_wildcards_are_said_to_be_exposed() -> None:
    """An insecure broker knows that it is one, so that it can warn."""
    with bound_sockets(host="*", insecure=True) as bound:
        assert is_exposed(bound)


def test_a_port_numbers_the_next_four_sockets_too() -> None:
    """frames has the configured port, intake, results, workers and control the next four."""
    with contextlib.ExitStack() as stack:
        for base in range(20_000, 60_000, 97):  # the first five neighbours that are free on this machine
            with contextlib.suppress(ConfigError):
                bound = stack.enter_context(bound_sockets(port=base))
                break

        ports = [int(bound.addresses[role].rpartition(":")[2]) for role in Role]

    assert ports == [base, base + 1, base + 2, base + 3, base + 4]


def test_a_taken_port_is_named_with_its_holder() -> None:
    """PRC-05: the error says which port and, as it is ours to see, which process."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]

        with pytest.raises(ConfigError, match=rf"port {port} is taken by process {os.getpid()} \("):
            bind_sockets(settings(workers=f"tcp://127.0.0.1:{port}"))


def test_nothing_stays_bound_when_one_socket_fails() -> None:
    """No half-started broker: the sockets bound before the one that failed are free again."""
    with socket.create_server(("127.0.0.1", 0)) as holder, socket.create_server(("127.0.0.1", 0)) as probe:
        free_port = probe.getsockname()[1]
        probe.close()
        taken = f"tcp://127.0.0.1:{holder.getsockname()[1]}"

        with pytest.raises(ConfigError):
            bind_sockets(settings(frames=f"tcp://127.0.0.1:{free_port}", control=taken))

        assert not can_reach(f"tcp://127.0.0.1:{free_port}")


@pytest.mark.parametrize(
    ("host", "problem"),
    [("192.0.2.1", "no such address"), ("no-such-host.invalid", "this name has no address")],
    ids=["not ours", "unknown name"],
)
def test_a_host_that_is_not_this_machine_is_refused(host: str, problem: str) -> None:
    """The error names the host and says what is wrong with it."""
    with pytest.raises(ConfigError, match=f"broker.host = '{host}'.*{problem}"):
        bind_sockets(settings(host=host, insecure=True))


def test_a_name_is_bound_by_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any host name works that the machine can look up; each address once."""
    rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))] * 2
    monkeypatch.setattr("headrace.broker.binding.os_socket.getaddrinfo", lambda *_a, **_k: rows)

    assert resolve_hosts("broker.host", "my-machine") == ("127.0.0.1",)


class UnluckySocket:
    """Stands for a socket on a machine where the port that one host gave is taken on the other."""

    def __init__(self, errors: list[int]) -> None:
        self.errors = errors
        self.bound: list[str] = []

    def bind(self, endpoint: str) -> None:
        if self.bound and self.errors and (number := self.errors.pop(0)):
            raise zmq.ZMQError(number)
        self.bound.append(endpoint.replace("*", str(7_000 + len(self.errors))))

    def unbind(self, endpoint: str) -> None:
        self.bound.remove(endpoint)

    def getsockopt(self, _option: int) -> bytes:
        return self.bound[-1].encode()


PLAN = Plan(Role.FRAMES, "broker.host", "localhost", hosts=("127.0.0.1", "::1"))


def test_a_port_that_is_free_on_one_family_only_is_tried_again() -> None:
    """With port 0 another port is drawn until both hosts can have it."""
    unlucky = UnluckySocket([errno.EADDRINUSE, errno.EADDRINUSE])

    address = _bind_tcp(unlucky, PLAN)  # type: ignore[arg-type]

    assert address == "tcp://127.0.0.1:7000"
    assert unlucky.bound == ["tcp://127.0.0.1:7000", "tcp://[::1]:7000"]


def test_a_machine_without_ipv6_binds_localhost_all_the_same() -> None:
    """Only the second family may be missing; the first is the one that is announced."""
    half = UnluckySocket([errno.EADDRNOTAVAIL])

    address = _bind_tcp(half, PLAN)  # type: ignore[arg-type]

    assert half.bound == [address]


@pytest.mark.parametrize(
    ("number", "problem"), [(errno.EADDRINUSE, "is taken"), (errno.EACCES, "Permission denied")]
)
def test_the_tries_for_a_common_port_end(number: int, problem: str) -> None:
    """A machine on which no port is free on both families gets an error, not a loop."""
    with pytest.raises(ConfigError, match=problem):
        _bind_tcp(UnluckySocket([number] * 100), PLAN)  # type: ignore[arg-type]


def test_a_port_that_only_root_may_bind_is_named() -> None:
    """Whatever else the operating system says is passed on, with key, host and port."""
    with pytest.raises(ConfigError, match=r"broker\.host = 'localhost': the frames socket.*::1.*Permission"):
        _bind_tcp(UnluckySocket([errno.EACCES]), PLAN)  # type: ignore[arg-type]


def test_an_ipc_path_of_107_bytes_works(tmp_path: Path) -> None:
    """ZMQ-15: the operating system's limit is used to the last byte."""
    path = ipc_path(tmp_path, 107)

    with bound_sockets(frames=f"ipc://{path}") as bound, zmq.Context() as context:
        assert bound.addresses[Role.FRAMES] == f"ipc://{path}"
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(bound.addresses[Role.FRAMES])
            dealer.send(b"hello")
            assert bound.by_role[Role.FRAMES].poll(5_000)


@pytest.mark.parametrize("length", [108, 200])
def test_an_ipc_path_over_the_limit_stops_the_start(tmp_path: Path, length: int) -> None:
    """ZMQ-15: path, length and limit are named, and nothing was bound before."""
    path = ipc_path(tmp_path, length)
    earlier = tmp_path / "frames"

    with pytest.raises(ConfigError, match=rf"{path}.* {length} bytes.* 107"):
        bind_sockets(settings(frames=f"ipc://{earlier}", control=f"ipc://{path}"))

    assert not earlier.exists()


def test_an_ipc_path_is_measured_in_bytes() -> None:
    """ZMQ-15: 60 characters may be 120 bytes."""
    with pytest.raises(ConfigError, match=r"120 bytes"):
        bind_sockets(settings(frames="ipc:///" + "\u00e9" * 59 + "x"))


def test_the_ipc_socket_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    """ZeroMQ would delete it and take its place: the broker says that the path is taken."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(path)
        holder.listen()

        with pytest.raises(ConfigError, match="another process listens there"):
            bind_sockets(settings(frames=f"ipc://{path}"))

        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_the_ipc_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    """A killed broker leaves its file behind; the next one starts all the same."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    with bound_sockets(frames=f"ipc://{path}") as bound:
        assert bound.addresses[Role.FRAMES] == f"ipc://{path}"


def test_a_file_that_is_no_socket_is_never_deleted(tmp_path: Path) -> None:
    """ZeroMQ would delete it: the broker refuses to start."""
    path = tmp_path / "notes.txt"
    path.write_text("mine")

    with pytest.raises(ConfigError, match="not a socket"):
        bind_sockets(settings(frames=f"ipc://{path}"))

    assert path.read_text() == "mine"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """The remedy for an ipc path in a folder that is not there is to create it."""
    with pytest.raises(ConfigError, match=f"the folder {tmp_path}/none does not exist"):
        bind_sockets(settings(frames=f"ipc://{tmp_path}/none/s"))


def test_an_abstract_ipc_address_has_no_file() -> None:
    """Linux's abstract namespace needs no folder and leaves nothing behind."""
    name = f"@headrace-test-{os.getpid()}"

    with bound_sockets(frames=f"ipc://{name}") as bound:
        assert bound.addresses[Role.FRAMES] == f"ipc://{name}"
