"""Every channel of a process is made here."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from rolemesh.rpc import tls

MAX_MESSAGE_BYTES = 64 << 20

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


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel with the keys that this process has now; plain where it has none."""
    keys = tls.current_keys()
    if keys is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    options = [*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", keys.name)]
    return grpc.aio.secure_channel(address, keys.channel_credentials(), options=options)


class Line:
    """A channel to one address that lasts as long as the process, whatever becomes of its keys.

    gRPC connects a channel with the keys that it was made with. When there are new ones a second channel is
    opened beside it, and new calls go there as soon as it is connected: the other end may get its own new keys
    later. Calls that run stay where they are, to their end.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._keys: tls.Keys | None = None
        self._channel: grpc.aio.Channel | None = None
        self._next: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """Where a call is to be made now. The first is made in the event loop that asks."""
        keys = tls.current_keys()
        if self._channel is None:
            self._channel, self._keys = open_channel(self.address), keys
        elif keys is not self._keys:
            self._next, self._keys = open_channel(self.address), keys
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
