"""Mutual TLS. The keys of a process lie in a directory: tls.crt, tls.key and ca.crt, as cert-manager has them.

A process that has keys makes no connection without them and takes none: both ends show a certificate of the
authority in ca.crt, and each looks for its own name in the other's. That name is the first DNS name of the
certificate, whatever address the peer was called by; the processes of a job share it.

The files may be replaced while the process runs: servers look at each new connection, channels at each call
(channels.py). A generation that is not whole, or does not fit together, is not taken.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from rolemesh.errors import InvalidConfig

log = logging.getLogger(__name__)

CERTIFICATE, KEY, AUTHORITY = FILES = ("tls.crt", "tls.key", "ca.crt")


@dataclass(frozen=True)
class Keys:
    """One generation of a directory's files, as PEM.

    Args:
        name: the certificate's first DNS name, which the peer's has to have too.
        expires: when the certificate does.
    """

    certificate: bytes
    key: bytes
    authority: bytes
    name: str
    expires: datetime

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Of a client."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Of a server."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.authority)


class KeyFolder:
    """The keys in a directory, read again when its files have changed.

    Raises:
        InvalidConfig: a file is absent, is not what it should be, or does not fit the others.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stamp = _stamp(directory)
        self._keys = self._read()

    def current(self) -> Keys:
        """The newest generation that is whole. Any thread may ask."""
        stamp = _stamp(self.directory)
        if stamp != self._stamp:
            self._stamp = stamp  # what is half written now will have another one when it is whole
            try:
                self._keys = self._read()
            except InvalidConfig as error:
                log.warning("the keys before stay in use: %s", error)
            else:
                log.info("new keys from %s, until %s", self.directory, self._keys.expires)
        return self._keys

    def server_credentials(self) -> grpc.ServerCredentials:
        """Every client has to show a certificate. The files are looked at for every new connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._keys.server_configuration(),
            lambda: self.current().server_configuration(),
            require_client_authentication=True,
        )

    def _read(self) -> Keys:
        keys = read_keys(self.directory)
        if keys.expires <= datetime.now(UTC):
            log.warning("%s expired at %s", self.directory / CERTIFICATE, keys.expires)
        return keys


def read_keys(directory: Path) -> Keys:
    """The files of one generation.

    Raises:
        InvalidConfig: which file is absent, is not what it should be, or does not fit the others.
    """
    # Kubernetes swaps the link ..data, behind which the files of one generation lie.
    data = directory / "..data"
    generation = (data if data.exists() else directory).resolve()
    try:
        certificate, key, authority = ((generation / name).read_bytes() for name in FILES)
    except OSError as error:
        raise InvalidConfig(
            f"TLS needs {', '.join(FILES)} in {directory}: {error.strerror}: {error.filename}"
        ) from error
    try:
        own = x509.load_pem_x509_certificate(certificate)
        private = load_pem_private_key(key, password=None)
        x509.load_pem_x509_certificates(authority)
    except (ValueError, TypeError) as error:  # TypeError: the key has a password
        raise InvalidConfig(
            f"{directory}: {', '.join(FILES)} are to be PEM, without a password: {error}"
        ) from error
    if private.public_key() != own.public_key():
        raise InvalidConfig(f"{directory}: {KEY} is not the key of {CERTIFICATE}")
    name = next(iter(_dns_names(own)), "")
    if not name or "*" in name:
        raise InvalidConfig(
            f"{directory / CERTIFICATE} is to have a DNS name that all processes of the job share "
            f"(subjectAltName); its first one is {name!r}"
        )
    return Keys(certificate, key, authority, name, own.not_valid_after_utc)


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return extension.value.get_values_for_type(x509.DNSName)


def _stamp(directory: Path) -> list[tuple[int, int, int] | None]:
    """Differs once a file was written or replaced."""
    stamps: list[tuple[int, int, int] | None] = []
    for name in FILES:
        try:
            stat = (directory / name).stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return stamps


# -------------------------------------------------------------------------------- the process's own keys

# Set once, before the process serves or calls. A context variable, so that a test can be two processes.
_folder: ContextVar[KeyFolder | None] = ContextVar("keys", default=None)


def use_keys(directory: Path | None) -> None:
    """From now on all gRPC of this process is TLS with the keys in the directory; None: plain.

    Raises:
        InvalidConfig: what is wrong with the keys.
    """
    _folder.set(KeyFolder(directory) if directory else None)


def current_keys() -> Keys | None:
    """What this process shows now; None: it speaks plain."""
    folder = _folder.get()
    return folder.current() if folder else None


def add_port(server: grpc.aio.Server, address: str) -> int:
    """Binds a server's port for services: with TLS where this process has keys. Returns the port's number.

    Raises:
        RuntimeError: gRPC could not bind it.
    """
    folder = _folder.get()
    if folder is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, folder.server_credentials())


def stranger(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """ "" where the caller is of this process's job, else whose certificate it showed. One authority may serve
    several jobs, and none is to call another's roles."""
    keys = current_keys()
    if keys is None:
        return ""
    names = [name.decode() for name in context.auth_context().get("x509_subject_alternative_name", ())]
    return "" if keys.name in names else f"for callers of {keys.name}; this one's certificate is for {names}"


# --------------------------------------------------------------------------------- what went wrong


def explain(details: str) -> str:
    """gRPC's words for how a call ended, or plainer ones where the two ends do not agree on TLS."""
    cut = "failed to connect" in details and ("Socket closed" in details or "reset by peer" in details)
    folder = _folder.get()
    if folder is None:
        hint = "it hangs up on a plain connection: if it has keys, give this process --tls-dir too"
        return f"{hint} ({details})" if cut else details
    keys, directory = folder.current(), folder.directory
    if cut and keys.expires <= datetime.now(UTC):
        return f"it refuses this process's certificate: {directory / CERTIFICATE} expired at {keys.expires}"
    if cut:
        hint = f"its {AUTHORITY} lacks the authority of {directory / CERTIFICATE}"
        return f"it hangs up on this process's certificate: {hint}, or it ended just now ({details})"
    for words, meaning in (
        ("WRONG_VERSION_NUMBER", "it speaks plain, and this process has keys: start it with --tls-dir too"),
        ("certificate has expired", "its certificate has expired: renew the keys in its --tls-dir"),
        ("CERTIFICATE_VERIFY_FAILED", f"its certificate is not of the authority in {directory / AUTHORITY}"),
        ("Hostname Verification", f"its certificate is not for {keys.name!r}: is it of another job?"),
    ):
        if words in details:
            return f"{meaning} ({details})"
    return details
