"""Ports of this machine: free ones for engines, and whether the server can have the one that it wants."""

from __future__ import annotations

import errno
import socket
import sys
from typing import Any

from chat_server.errors import StartError

#: connections that wait to be taken, as uvicorn has it.
_BACKLOG = 2048
#: Whether the kernel deals connections out between sockets of one address.
_SPREADS = sys.platform == "linux"
#: An address that this machine does not have.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


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
    for group in listen(host, port, 1):
        for one in group:
            one.close()


def listen(host: str, port: int, count: int) -> list[list[socket.socket]]:
    """Listening sockets on one port for ``count`` processes: each gets one per address of ``host``.

    The kernel deals new connections out evenly between the sockets of an address; where it does not (all but Linux) the
    processes share one. Raises StartError, with what to do.
    """
    groups: list[list[socket.socket]] = [[] for _ in range(count)]
    trouble: OSError | None = None
    try:
        for family, _, _, _, (name, _, *scope) in _addresses(host, port):
            try:
                first = _bind(family, (name, port, *scope), alone=True)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                trouble = error  # `localhost` has two addresses, also where there is no IPv6
                continue
            groups[0].append(first)
            port = first.getsockname()[1]  # if a free one was taken: the same for all
            for group in groups[1:]:
                group.append(_bind(family, first.getsockname()) if _SPREADS else first.dup())
        if trouble is not None and not groups[0]:
            raise trouble
        for group in groups:
            for one in group:
                one.listen(_BACKLOG)
    except OSError as error:
        for group in groups:
            for one in group:
                one.close()
        raise _cannot_listen(host, port, error) from None
    return groups


def _addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys(found))


def _bind(family: int, address: Any, *, alone: bool = False) -> socket.socket:
    """A bound socket beside others of ours on the address; ``alone``: only if nobody else has it."""
    one = socket.socket(family)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what asyncio does when it listens
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # that too
        if _SPREADS and not alone:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(address)
        if _SPREADS and alone:  # after the bind, which fails so if another server with workers has the port
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        one.close()
        raise
    return one


def _cannot_listen(host: str, port: int, error: OSError) -> StartError:
    if isinstance(error, socket.gaierror):
        return StartError(f"There is no address {host}. Give --host 127.0.0.1, or an address of this machine.")
    if error.errno == errno.EADDRINUSE:
        hint = f"Stop the program that listens there (perhaps another chat-server), or give --port {port + 1}."
        return StartError(f"Port {port} on {host} is in use. {hint}")
    if error.errno == errno.EACCES:
        return StartError(f"Port {port} needs more rights than you have. Give a port above 1023.")
    return StartError(f"Cannot listen on {host}:{port}: {error.strerror}. Look at --host and --port.")
