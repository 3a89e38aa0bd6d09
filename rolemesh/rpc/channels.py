"""Every channel of a process is made here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import AddressValueError, IPv6Address

import grpc

from rolemesh.errors import InvalidConfig
from rolemesh.rpc import tls
from rolemesh.wire.limits import MAX_MESSAGE_BYTES

# Of every channel and server.
CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
CLIENT_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # roles are reached directly, whatever the shell's http_proxy says
    # A machine that vanishes sends no reset: pings find out, also while a call computes and nothing flows.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


# A name of DNS (or of a hosts file, where names have underscores), or an IPv4 address.
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
PORT = re.compile(r"[0-9]{1,5}")


def check_address(address: str) -> None:
    """Raises InvalidConfig unless the address is `host:port` or `[v6]:port`.

    gRPC accepts other addresses too, such as `unix:/run/some.sock`. An address may come from a caller, and must
    not make a role speak to anything but a port of a host.
    """
    host, _, port = address.rpartition(":")
    if not (PORT.fullmatch(port) and 0 < int(port) < 65536 and (HOST.fullmatch(host) or _is_bracketed(host))):
        shown = repr(address if len(address) <= 300 else address[:300] + "…")
        raise InvalidConfig(f"{shown} is not an address; write host:port, e.g. 127.0.0.1:50051 or [::1]:50051")


def _is_bracketed(host: str) -> bool:
    try:
        IPv6Address(host[1:-1])
    except AddressValueError:
        return False
    return host[0] + host[-1] == "[]" and "%" not in host


def open_channel(address: str, role: str) -> grpc.aio.Channel:
    """A channel to host:port, where a server's certificate names the role, with the keys that this process has
    now; plain where it has none.

    Raises:
        InvalidConfig: not host:port.
    """
    check_address(address)
    target = f"dns:///{address}"  # so that `unix:1` is port 1 of a host called unix
    keys = tls.current_keys()
    if keys is None:
        return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
    options = [*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", tls.dns_name(role, keys.job))]
    return grpc.aio.secure_channel(target, keys.channel_credentials(), options=options)


class Line:
    """A channel to a role at one address that lasts as long as the process, whatever becomes of its keys.

    gRPC connects a channel with the keys that it was made with. When there are new ones a second channel is
    opened beside it, and new calls go there as soon as it is connected: the other end may get its own new keys
    later. Calls that run stay where they are, to their end.
    """

    def __init__(self, address: str, role: str) -> None:
        self._address, self._role = address, role
        self._keys: tls.Keys | None = None
        self._channel: grpc.aio.Channel | None = None
        self._next: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """Where a call is to be made now. The first is made in the event loop that asks."""
        keys = tls.current_keys()
        if self._channel is None:
            self._channel, self._keys = open_channel(self._address, self._role), keys
        elif keys is not self._keys:
            self._next, self._keys = open_channel(self._address, self._role), keys
        if self._next is not None:
            ready = grpc.ChannelConnectivity.READY
            if self._next.get_state(try_to_connect=True) is ready or self._channel.get_state() is not ready:
                # Not closed, which would cancel its calls: its connection ends with the last of them.
                self._channel, self._next = self._next, None
        return self._channel

    async def close(self) -> None:
        """Calls that run are cancelled."""
        for channel in (self._channel, self._next):
            if channel is not None:
                await channel.close(None)
        self._channel = self._next = None
