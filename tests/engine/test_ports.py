"""Which ports are free, and what is said of the others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from chat_server.engine.ports import check_port, free_ports, listen
from chat_server.errors import StartError

pytestmark = pytest.mark.server


def test_free_ports_are_free_and_different() -> None:
    """Each of them can be listened on, all at once."""
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        check_port("127.0.0.1", port)


def test_a_port_in_use_is_said_so() -> None:
    """The message names the port and the way out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"Port {port} on 127.0.0.1 is in use.*--port {port + 1}"):
            check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_said_so() -> None:
    """An address from the documentation's range is not ours."""
    with pytest.raises(StartError, match=r"Cannot listen on 192\.0\.2\.1:8000.*--host"):
        check_port("192.0.2.1", 8000)


def test_a_name_without_address_is_said_so() -> None:
    """A name that does not resolve (.invalid never does) gives a message, not a traceback."""
    with pytest.raises(StartError, match=r"no address host\.invalid"):
        check_port("host.invalid", 8000)


@contextmanager
def listening(host: str, port: int, count: int) -> Iterator[list[list[socket.socket]]]:
    groups = listen(host, port, count)
    try:
        yield groups
    finally:
        for one in (one for group in groups for one in group):
            one.close()


def test_several_processes_get_a_socket_each_on_one_port() -> None:
    """New connections are dealt out between them; one that waits is not lost when a process closes its copy."""
    with listening("127.0.0.1", 0, 2) as ([one], [two]):
        address = one.getsockname()
        assert two.getsockname() == address
        clients = [socket.create_connection(address) for _ in range(64)]
        copy = one.dup()
        copy.close()
        taken = []
        for listener in (one, two):
            listener.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    taken.append((listener, listener.accept()[0]))
        counts = [sum(listener is which for listener, _ in taken) for which in (one, two)]
        for connection in (*clients, *(accepted for _, accepted in taken)):
            connection.close()
    assert sum(counts) == 64
    assert min(counts) > 8, "chance has it otherwise once in a thousand million years of runs"


def test_a_port_that_is_dealt_out_is_in_use_for_others() -> None:
    """Nobody else gets a share of the connections, not even another server that deals them out."""
    with listening("127.0.0.1", 0, 2) as ([one], _):
        port = one.getsockname()[1]
        for count in (1, 2):
            with pytest.raises(StartError, match=f"Port {port} on 127.0.0.1 is in use"):
                listen("127.0.0.1", port, count)


def test_all_addresses_of_a_name_are_listened_on() -> None:
    """``localhost`` is two where there is IPv6, and both have the same port, also if it is any free one."""
    with listening("localhost", 0, 2) as groups:
        addresses = [[one.getsockname() for one in group] for group in groups]
    assert addresses[0] == addresses[1]
    assert "127.0.0.1" in {address[0] for address in addresses[0]}
    assert len({address[1] for address in addresses[0]}) == 1
