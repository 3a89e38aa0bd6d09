"""Authorities with real keys, and directories of certificates that they sign."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HOUR = timedelta(hours=1)
generations = count(1)


class Authority:
    """Signs certificates."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(self._key, self._name, HOUR, ca=True)

    @property
    def private(self) -> bytes:
        return _pem(self._key)

    def _sign(
        self,
        key: ec.EllipticCurvePrivateKey,
        subject: x509.Name,
        lasts: timedelta,
        *names: str,
        ca: bool = False,
    ) -> bytes:
        until = datetime.now(UTC) + lasts
        builder = (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(until - 10 * HOUR)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def keys(self, job: str, *roles: str, **more: Any) -> dict[str, bytes]:
        """Make the files of a process of the job that has these roles."""
        return self.files(job, *(f"{role}.{job}" for role in roles), **more)

    def files(
        self, *names: str, lasts: timedelta = HOUR, trusted: bytes = b"", common_name: str = "process"
    ) -> dict[str, bytes]:
        """Make a new key and its certificate for these DNS names. `trusted`: additional authorities."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
        certificate = self._sign(key, subject, lasts, *names)
        return {"tls.crt": certificate, "tls.key": _pem(key), "ca.crt": self.certificate + trusted}


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def swap(directory: Path, files: dict[str, bytes]) -> Path:
    """Replace the files as a kubelet does for a Secret: by replacing one symbolic link."""
    generation = directory / f"..generation-{next(generations)}"
    generation.mkdir(parents=True)
    for name, content in files.items():
        (generation / name).write_bytes(content)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(Path("..data") / name)
    (directory / "..data_tmp").symlink_to(generation.name)
    os.rename(directory / "..data_tmp", directory / "..data")
    return directory
