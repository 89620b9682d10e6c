"""The key of the servers, and the addresses under which clients reach them.

A server without a key obeys any client that can reach its port, also one that replaces its weights.
The key is a secret: it is in no config.yaml, no message and no metric.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import urllib.parse

from megatron_stare.config import SGLangConfig, UserError

KEY_VARIABLE = "SGLANG_API_KEY"
_ANY_HOST = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}
# Addresses reserved for documentation: nothing is ever sent there.
_FAR = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


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
    """Addresses that other machines can reach although no key is set."""
    if api_key(settings):
        return []
    urls = [*settings.urls, *filter(None, [settings.router_url])]
    places = urls or [url_of(settings.host, settings.port)]
    hosts = {place: urllib.parse.urlsplit(place).hostname for place in places}
    return [place for place, host in hosts.items() if not _on_this_machine(host)]


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
    family = _ANY_HOST.get(host)
    return url_of(host if family is None else _outward(family) or socket.gethostname(), port)


def _outward(family: socket.AddressFamily) -> str:
    """This machine's address towards other machines; "" if there is none."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_FAR[family], 9))  # sends nothing: it finds the route of a packet
            address = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if _on_this_machine(address) else address


def _on_this_machine(host: str | None) -> bool:
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
