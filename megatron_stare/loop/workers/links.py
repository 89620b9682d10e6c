"""Connections between the run's first rank and the first ranks of the other nodes.

Both ends show that they belong to the run by a key that they have from a collective.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from megatron_stare.config import EngineError, UserError
from megatron_stare.loop.workers.channel import Channel
from megatron_stare.policy.topology import Topology, agreed

PATIENCE_SECONDS = 60.0  # for the other end, when the run starts
HELLO_SECONDS = 5  # for a caller to show that it belongs to the run


class Link(Channel):
    """One end of a connection between two nodes, which `hang_up` ends for whoever reads it."""

    def __init__(self, line: socket.socket) -> None:
        super().__init__(Connection(os.dup(line.fileno())))
        self._line = line

    def hang_up(self) -> None:
        """Both ends hear of it."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()


def linked(topology: Topology, ranks: Sequence[int]) -> dict[int, Link]:
    """By rank: on rank 0 a connection to each of the others, on these one to rank 0. Collective."""
    with contextlib.ExitStack() as stack:
        server: socket.socket | None = None
        key, place = b"", ("", 0)
        if topology.is_first:
            server = stack.enter_context(_server())
            key, place = secrets.token_bytes(32), (_own_name(), server.getsockname()[1])
        key, place = topology.gather((key, place))[0]

        def link() -> dict[int, Link]:
            if server is not None:
                return dict(_called(server, set(ranks) - {0}, key))
            return {0: _calling(place, key, topology.rank)} if topology.rank in ranks else {}

        found: dict[int, Link] = {}
        agreed(topology, lambda: found.update(link()))
        return found


def _own_name() -> str:
    """The name of rank 0's machine, by which the others have found it before."""
    return os.environ.get("MASTER_ADDR") or "localhost"


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _calling(place: tuple[str, int], key: bytes, rank: int) -> Link:
    try:
        line = socket.create_connection(place, timeout=PATIENCE_SECONDS)
        with (
            _within(line, PATIENCE_SECONDS),
            contextlib.closing(Connection(os.dup(line.fileno()))) as hello,
        ):
            answer_challenge(hello, key)
            deliver_challenge(hello, key)
            hello.send_bytes(struct.pack("<q", rank))
    except (OSError, EOFError, AuthenticationError) as error:
        raise UserError(
            f"rank {rank} cannot reach rank 0 at {place[0]}:{place[1]} ({error}); MASTER_ADDR must "
            "be a name of rank 0's machine, and the ports between the run's nodes open"
        ) from None
    return Link(line)


def _called(server: socket.socket, ranks: set[int], key: bytes) -> Iterator[tuple[int, Link]]:
    """A connection to each of these ranks, as they call. Whoever else calls is sent away."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while ranks:
        server.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            line, _ = server.accept()
        except TimeoutError:
            raise EngineError(
                f"ranks {sorted(ranks)}, the first of their nodes, have not called rank 0 in "
                f"{PATIENCE_SECONDS:g} s; see what these say"
            ) from None
        rank = -1
        with (
            contextlib.suppress(OSError, EOFError, AuthenticationError, struct.error),
            _within(line, HELLO_SECONDS),
            contextlib.closing(Connection(os.dup(line.fileno()))) as hello,
        ):
            deliver_challenge(hello, key)
            answer_challenge(hello, key)
            (rank,) = struct.unpack("<q", hello.recv_bytes(8))
        if rank in ranks:
            ranks.discard(rank)
            yield rank, Link(line)
        else:
            line.close()


@contextlib.contextmanager
def _within(line: socket.socket, seconds: float) -> Iterator[None]:
    """What is read from the connection meanwhile comes within this time, or OSError."""
    line.setblocking(True)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))
    yield
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
