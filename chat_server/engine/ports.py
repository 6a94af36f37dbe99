"""Ports of this machine: free ones for engines, and whether the server can have the one that it wants."""

from __future__ import annotations

import errno
import socket

from chat_server.errors import StartError


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def check_port(host: str, port: int) -> None:
    """Raise StartError, with what to do, if nobody could listen there now."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what asyncio does when it listens
            probe.bind(address)
            probe.listen()
    except socket.gaierror:
        raise StartError(f"There is no address {host}. Give --host 127.0.0.1, or an address of this machine.") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            hint = f"Stop the program that listens there (perhaps another chat-server), or give --port {port + 1}."
            raise StartError(f"Port {port} on {host} is in use. {hint}") from None
        if error.errno == errno.EACCES:
            raise StartError(f"Port {port} needs more rights than you have. Give a port above 1023.") from None
        raise StartError(f"Cannot listen on {host}:{port}: {error.strerror}. Look at --host and --port.") from None
