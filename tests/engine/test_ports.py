"""Which ports are free, and what is said of the others."""

from __future__ import annotations

import socket

import pytest

from chat_server.engine.ports import check_port, free_ports
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
