"""Mutual TLS. A process's keys are the files tls.crt, tls.key and ca.crt of a directory, as in cert-manager.

A process with keys makes and accepts only TLS connections: both sides show a certificate signed by the
authority in ca.crt. The certificate's first DNS name is the job's. Each further name ROLE.JOB gives the process
that role. A client checks that the server has the role it calls, at any address. A server checks the client's
roles (access.py).

The files may be replaced while the process runs. Servers check them for each new connection, channels for each
call (channels.py). A generation of files that is incomplete or inconsistent is not used.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from rolemesh.errors import InvalidConfig, unreadable
from rolemesh.rpc.contract import CALLERS

log = logging.getLogger(__name__)

CERTIFICATE, KEY, AUTHORITY = FILES = ("tls.crt", "tls.key", "ca.crt")


@dataclass(frozen=True)
class Keys:
    """One generation of a directory's files, as PEM.

    Args:
        certificate: the content of tls.crt.
        key: the content of tls.key.
        authority: the content of ca.crt.
        names: the certificate's DNS names.
        expires: when the certificate expires.
    """

    certificate: bytes
    key: bytes
    authority: bytes
    names: tuple[str, ...]
    expires: datetime

    @property
    def job(self) -> str:
        """The job's name: the first DNS name, shared by all processes of the job."""
        return self.names[0]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Build a client's credentials."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Build a server's certificate configuration."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.authority)


class KeyFolder:
    """Reads the keys in a directory, and reads them again when the files change.

    Args:
        directory: contains the files.
        roles: roles that the certificate must name.

    Raises:
        InvalidConfig: a file is missing, is malformed, or does not match the others, or a role is not named.
    """

    def __init__(self, directory: Path, roles: Collection[str] = ()) -> None:
        self.directory = directory
        self._roles = roles
        self._stamp = _stamp(directory)
        self._keys = self._read()

    def current(self) -> Keys:
        """Return the newest valid generation. Safe to call from any thread."""
        stamp = _stamp(self.directory)
        if stamp != self._stamp:
            self._stamp = stamp  # files that are half written now get another stamp when complete
            try:
                self._keys = self._read()
            except InvalidConfig as error:
                log.warning("the new keys are invalid; the previous ones stay in use: %s", error)
            except OSError as error:  # it may pass, so the next call tries again
                self._stamp = []
                log.warning("the new keys cannot be read; the previous ones stay in use: %s", error)
            else:
                log.info("loaded new keys from %s; they expire at %s", self.directory, self._keys.expires)
        return self._keys

    def server_credentials(self) -> grpc.ServerCredentials:
        """Build credentials that require client certificates, and reload the files if needed per connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._keys.server_configuration(),
            lambda: self.current().server_configuration(),
            require_client_authentication=True,
        )

    def _read(self) -> Keys:
        keys = read_keys(self.directory)
        _check_names(self.directory / CERTIFICATE, keys)
        if absent := set(self._roles) - roles_in(keys.names, keys.job):
            raise InvalidConfig(_names_lacking(self.directory, keys.job, self._roles, absent))
        if keys.expires <= datetime.now(UTC):
            log.warning("%s expired at %s", self.directory / CERTIFICATE, keys.expires)
        return keys


def read_keys(directory: Path) -> Keys:
    """Read and check the files of one generation.

    Raises:
        InvalidConfig: a file is missing, is malformed, or does not match the others. The message names it.
        OSError: an I/O error.
    """
    # Kubernetes swaps the link ..data, which points to the files of one generation.
    data = directory / "..data"
    generation = (data if data.exists() else directory).resolve()
    try:
        certificate, key, authority = ((generation / name).read_bytes() for name in FILES)
    except OSError as error:
        raise unreadable(
            InvalidConfig,
            error,
            f"TLS needs {', '.join(FILES)} in {directory}: {error.strerror}: {error.filename}",
        ) from error
    try:
        own = x509.load_pem_x509_certificate(certificate)
        private = load_pem_private_key(key, password=None)
        x509.load_pem_x509_certificates(authority)
    except (ValueError, TypeError) as error:  # TypeError: the key has a password
        raise InvalidConfig(
            f"{directory}: {', '.join(FILES)} must be PEM, without a password: {error}"
        ) from error
    if private.public_key() != own.public_key():
        raise InvalidConfig(f"{directory}: {KEY} is not the key of {CERTIFICATE}")
    names = _dns_names(own)
    job = next(iter(names), "")
    if not job or "*" in job:
        raise InvalidConfig(
            f"{directory / CERTIFICATE} must have a DNS name (subjectAltName) that all processes of the job "
            f"share; its first one is {job!r}"
        )
    return Keys(certificate, key, authority, tuple(names), own.not_valid_after_utc)


def dns_name(role: str, job: str) -> str:
    """Return the DNS name that gives a certificate's process this role of the job."""
    return f"{role}.{job}"


def roles_in(names: Collection[str], job: str) -> set[str]:
    """Return the roles of the job that a certificate with these DNS names has."""
    end = dns_name("", job)
    return {name.removesuffix(end) for name in names if name.endswith(end)}


def _check_names(certificate: Path, keys: Keys) -> None:
    """Reject names that would give the process more than they seem to.

    gRPC lets `*` match one label of a server's name. And a job named `actor.my-job` would be the actor of
    my-job.

    Raises:
        InvalidConfig: names the offending name.
    """
    if wild := [name for name in keys.names if "*" in name]:
        raise InvalidConfig(f"{certificate} has the DNS name {wild[0]!r}; name each role, as ROLE.{keys.job}")
    role, _, job = keys.job.partition(".")
    if job and role.lower() in CALLERS.values():
        raise InvalidConfig(
            f"{certificate}: the first DNS name must be the job's, and {keys.job!r} is the {role} of another "
            f"job; put the job's name before ROLE.JOB, and let it not begin with a role"
        )


def _names_lacking(directory: Path, job: str, roles: Collection[str], absent: Collection[str]) -> str:
    names = ",".join(f"DNS:{name}" for name in (job, *(dns_name(role, job) for role in roles)))
    key, certificate = (shlex.quote(str(directory / name)) for name in (KEY, CERTIFICATE))
    return (
        f"{directory / CERTIFICATE} is for job {job!r} (its first DNS name) and does not name "
        f"{', '.join(sorted(absent))}, which this process is. Sign a new one, where the authority's key is: "
        f"openssl req -new -key {key} -subj /CN=process -addext {shlex.quote(f'subjectAltName={names}')} | "
        f"openssl x509 -req -CA ca.crt -CAkey ca.key -days 90 -copy_extensions copy -out {certificate}"
    )


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return extension.value.get_values_for_type(x509.DNSName)


def _stamp(directory: Path) -> list[tuple[int, int, int] | None]:
    """Return a value that changes when a file is written or replaced."""
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

# Set once, before the process serves or calls. A context variable, so that a test can play two processes.
_folder: ContextVar[KeyFolder | None] = ContextVar("keys", default=None)


def use_keys(directory: Path | None, *roles: str) -> None:
    """Use TLS with the keys in the directory for all gRPC of this process from now on; None: no TLS.

    Args:
        directory: contains the keys.
        roles: the roles of this process: those that it serves, or controller, or operator.

    Raises:
        InvalidConfig: the keys are invalid; the message says why.
    """
    _folder.set(KeyFolder(directory, roles) if directory else None)


def current_keys() -> Keys | None:
    """Return the keys that this process uses now; None if it does not use TLS."""
    folder = _folder.get()
    return folder.current() if folder else None


def add_port(server: grpc.aio.Server, address: str) -> int:
    """Bind a server's port for services, with TLS if this process has keys. Returns the port's number.

    Raises:
        RuntimeError: gRPC could not bind it.
    """
    folder = _folder.get()
    if folder is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, folder.server_credentials())


def names_of_caller(context: grpc.aio.ServicerContext[Any, Any]) -> list[str]:
    """Return the DNS names of the caller's certificate."""
    return [name.decode(errors="backslashreplace") for name in context.auth_context().get("peer_dns", ())]


# --------------------------------------------------------------------------------- what went wrong


def explain(details: str) -> str:
    """Return gRPC's details of a failed call, with a plainer explanation if the two sides disagree on TLS."""
    cut = "failed to connect" in details and ("Socket closed" in details or "reset by peer" in details)
    folder = _folder.get()
    if folder is None:
        hint = "it hangs up on a plain connection: if it has keys, give this process --tls-dir too"
        return f"{hint} ({details})" if cut else details
    keys = folder.current()
    directory = folder.directory
    if cut and keys.expires <= datetime.now(UTC):
        return f"it refuses this process's certificate: {directory / CERTIFICATE} expired at {keys.expires}"
    if cut:
        hint = f"its {AUTHORITY} lacks the authority of {directory / CERTIFICATE}"
        return f"it hangs up on this process's certificate: {hint}, or it ended just now ({details})"
    for words, meaning in (
        ("WRONG_VERSION_NUMBER", "it speaks plain, and this process has keys: start it with --tls-dir too"),
        ("certificate has expired", "its certificate has expired: renew the keys in its --tls-dir"),
        ("CERTIFICATE_VERIFY_FAILED", f"its certificate is not of the authority in {directory / AUTHORITY}"),
        (
            "Hostname Verification",
            f"its certificate is not for this role of {keys.job!r}: is it another job's, or another role's?",
        ),
    ):
        if words in details:
            return f"{meaning} ({details})"
    return details
