"""The key of the servers, and the addresses under which clients reach them.

A server without a key obeys any client that can reach its port, also one that replaces its weights.
The key is a secret: it is in no config.yaml, no message and no metric.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import urllib.parse

from megatron_stare.config import SGLangConfig, UserError

KEY_VARIABLE = "SGLANG_API_KEY"
# For each address that means every interface, one on the way to other machines. It is reserved for
# documentation: nothing is ever sent there.
_FAR = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}


def api_key(settings: SGLangConfig) -> str:
    """sglang.api_key, or else the environment's; "" if there is none."""
    key = settings.api_key or os.environ.get(KEY_VARIABLE, "")
    if key and not re.fullmatch(r"[!-~]+", key):
        raise UserError(
            f"sglang.api_key (or {KEY_VARIABLE}) has a space or a character that is not ASCII, "
            "which no request can carry; choose another"
        )
    return key


def standing_open(settings: SGLangConfig) -> list[str]:
    """The addresses that other machines can reach without a key."""
    if api_key(settings):
        return []
    urls = [*settings.urls, *filter(None, [settings.router_url])]
    places = urls or [url_of(settings.host, settings.port)]
    hosts = {place: urllib.parse.urlsplit(place).hostname for place in places}
    return [place for place, host in hosts.items() if not is_loopback(host)]


def url_of(host: str, port: int) -> str:
    """http://host:port, also for an address of IPv6."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def local_url(host: str, port: int) -> str:
    """The address on this machine of a server that listens on `host`."""
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return url_of(own.get(host, host), port)


def public_url(host: str, port: int) -> str:
    """The address for other machines. For a server that listens everywhere: this machine's outward
    address, or else its name.
    """
    if host in _FAR:
        outward = address_towards(_FAR[host])
        host = outward if outward and not is_loopback(outward) else socket.gethostname()
    return url_of(host, port)


def address_towards(host: str) -> str:
    """This machine's address, IPv4 or IPv6, from which packets to `host` leave; "" if `host` has no
    address, or no route leads there.
    """
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)  # sends nothing: it finds the route of a packet
                return str(probe.getsockname()[0])
    return ""


def is_loopback(host: str | None) -> bool:
    """Whether the host, a name or an address, is this machine's own loopback interface."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
