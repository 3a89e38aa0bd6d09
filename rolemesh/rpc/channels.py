"""Opens every gRPC channel of a process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import AddressValueError, IPv6Address

import grpc

from rolemesh.errors import InvalidConfig
from rolemesh.rpc import tls
from rolemesh.wire.limits import MAX_MESSAGE_BYTES, MAX_TRAILER_BYTES

# Options of every channel and server.
CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A machine that vanishes sends no reset. Pings detect it within 40 s, also during a computation without
    # data: a client asks another replica, and a server ends the calls of a controller that is gone.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # without this, gRPC waits 60 s for the answer to a ping
    ("grpc.http2.max_pings_without_data", 0),
)
CLIENT_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.max_metadata_size", MAX_TRAILER_BYTES),  # from 8 KiB on, gRPC's default, calls would fail at random
    ("grpc.enable_http_proxy", 0),  # reach roles directly, even if the shell sets http_proxy
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


# A DNS name (or a name of a hosts file, which may contain underscores), or an IPv4 address.
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
PORT = re.compile(r"[0-9]{1,5}")


def check_address(address: str) -> None:
    """Raise InvalidConfig unless the address is `host:port` or `[v6]:port`.

    gRPC also accepts other addresses, such as `unix:/run/some.sock`. An address may come from a caller, which
    must not be able to connect a role to anything but a host's port.
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


def open_channel(
    address: str, role: str, options: Sequence[tuple[str, int]] = CLIENT_OPTIONS
) -> grpc.aio.Channel:
    """Open a channel to a role at host:port, with this process's current keys, or without TLS if it has none.

    Under TLS, the server's certificate must name the role.

    Args:
        address: host:port.
        role: the role that is called.
        options: of the channel.

    Raises:
        InvalidConfig: not host:port.
    """
    check_address(address)
    target = f"dns:///{address}"  # so that `unix:1` means port 1 of a host named unix
    keys = tls.current_keys()
    if keys is None:
        return grpc.aio.insecure_channel(target, options=options)
    named = [*options, ("grpc.ssl_target_name_override", tls.dns_name(role, keys.job))]
    return grpc.aio.secure_channel(target, keys.channel_credentials(), options=named)


class RoleChannel:
    """A channel to a role at one address that survives key rotation.

    A gRPC channel always uses the keys it was created with. When there are new keys, a second channel is
    opened, and the first one stays, because the other side may get its new keys later. New calls use the second
    channel once it is connected, or once the first one is no longer. Running calls finish on their channel.

    Args:
        address: host:port.
        role: the role that is called.
    """

    def __init__(self, address: str, role: str) -> None:
        self._address = address
        self._role = role
        self._keys: tls.Keys | None = None
        self._channel: grpc.aio.Channel | None = None
        self._next: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to use for a new call. The first access opens one in the current event loop."""
        keys = tls.current_keys()
        if self._channel is None:
            self._channel = open_channel(self._address, self._role)
            self._keys = keys
        elif keys is not self._keys:
            self._next = open_channel(self._address, self._role)
            self._keys = keys
        if self._next is not None:
            ready = grpc.ChannelConnectivity.READY
            if self._next.get_state(try_to_connect=True) is ready or self._channel.get_state() is not ready:
                # Closing the old channel would cancel its calls. Its connection ends after the last of them.
                self._channel = self._next
                self._next = None
        return self._channel

    async def close(self) -> None:
        """Close the channels; running calls are cancelled."""
        for channel in (self._channel, self._next):
            if channel is not None:
                await channel.close(None)
        self._channel = self._next = None
