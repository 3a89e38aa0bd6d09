"""What decides how a role answers: the keys of the job that it reads, the files that they name, its version.

A replica reports the fingerprint of the job that it was started with. A controller gives work only to replicas
with the fingerprint of its own job (docs/wire.md#fingerprints). Each key declares which roles read it
(rolemesh/config/key_facts.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rolemesh.catalog.plugin_imports import NAMED, installed_plugins, used_plugins
from rolemesh.catalog.role_specs import ROLES, RoleSpec
from rolemesh.config import JobConfig
from rolemesh.config.job_sections import KEY_FACTS
from rolemesh.config.yaml_file import in_json
from rolemesh.errors import InvalidBatch
from rolemesh.version import __version__

UNREADABLE = "unreadable"  # instead of the digest of a file that this process cannot read
MAX_FINGERPRINT_CHARACTERS = 7000  # gRPC limits all of an answer's metadata to 8 KiB
MAX_NAMED_KEYS = 5  # of the keys that differ; an error says how many more there are
SHOWN = 40  # characters of another server's version


@dataclass(frozen=True)
class Fingerprint:
    """What one role reads of one job.

    Args:
        version: of Rolemesh.
        digests: of the value of each key that the role reads, hexadecimal; of a file, of its content.
    """

    version: str
    digests: Mapping[str, str]

    @property
    def unreadable(self) -> list[str]:
        """The keys of files that this process cannot read. They are not compared."""
        return [key for key, digest in self.digests.items() if digest == UNREADABLE]

    def without(self, *sections: str) -> Fingerprint:
        """Return the fingerprint without the keys of these sections of the job."""
        kept = {key: digest for key, digest in self.digests.items() if key.partition(".")[0] not in sections}
        return replace(self, digests=kept)

    def difference(self, other: Fingerprint) -> str:
        """Return how another fingerprint differs in what this one has; "" if it does not."""
        if other.version != self.version:
            return f"it runs version {other.version[:SHOWN]!r} of Rolemesh, and this is {self.version!r}"
        known = {key: digest for key, digest in self.digests.items() if digest != UNREADABLE}
        unread = [key for key in other.unreadable if key in known]
        differing = [key for key, digest in known.items() if other.digests.get(key) != digest]
        if unread and len(differing) == len(unread):
            return f"it cannot read the file of {', '.join(unread)}, and this process can"
        more = f" and {len(differing) - MAX_NAMED_KEYS} more" if len(differing) > MAX_NAMED_KEYS else ""
        named = ", ".join(differing[:MAX_NAMED_KEYS]) + more
        return f"it was started with another job, which differs in {named}" if differing else ""

    def to_metadata(self) -> str:
        """Return the metadata's value, in ASCII."""
        return json.dumps({"version": self.version, "keys": dict(self.digests)}, separators=(",", ":"))

    @classmethod
    def of_metadata(cls, value: str) -> Fingerprint:
        """Read a fingerprint from an answer's metadata.

        Raises:
            InvalidBatch: the metadata is not a fingerprint.
        """
        try:
            if len(value) > MAX_FINGERPRINT_CHARACTERS:
                raise ValueError(f"{len(value)} characters")
            parsed = json.loads(value)
            found = cls(parsed["version"], parsed["keys"])
            if not isinstance(found.version, str) or not isinstance(found.digests, dict):
                raise TypeError("version must be a string, and keys an object")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidBatch(f"its fingerprint is invalid: {value[:100]!r} ({str(error)[:100]})") from None
        return found


def fingerprint(job: JobConfig, role: str) -> Fingerprint:
    """Return the fingerprint of a role of a job.

    Plug-ins count as this process has imported them, and other files as they are now.

    Args:
        job: as the role's process reads it: names at the Hub are not replaced by commits.
        role: key of ROLES.
    """
    spec = ROLES[role]
    values = dict(_values(job, spec))
    digests = {key: _digest(value) for key, value in values.items()}
    files = [key for key in values if KEY_FACTS[key].content and values[key] is not None]
    digests |= {key: content_digest(values[key]) for key in files}
    return Fingerprint(__version__, digests | {"plugins": _digest(_plugins(job, values))})


def _values(job: JobConfig, spec: RoleSpec) -> Iterator[tuple[str, Any]]:
    """Yield the keys that a role reads, with their values.

    Where the role's model follows the actor's, its values are the actor's.
    """
    whole = job.model_dump()
    model = job.model_of(spec.name).model_dump()
    for key, facts in KEY_FACTS.items():
        if spec.name in facts.read_by:
            of_model = key.startswith(f"{spec.model_key}.")
            value: Any = model if of_model else whole
            for part in (key.removeprefix(f"{spec.model_key}.") if of_model else key).split("."):
                value = value[part]
            yield key, in_json(value)  # options may have sets, whose order differs between processes


def _plugins(job: JobConfig, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the job's plug-ins, and of installed ones whose parts the role's keys name."""
    names = ((key, name) for key in NAMED.keys() & values.keys() for name in _listed(values[key]))
    parts = [NAMED[key][name] for key, name in names]
    installed = {plugin.origin for plugin in installed_plugins()}
    return used_plugins(job.plugins, [part for part in parts if part.origin in installed])


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def content_digest(path: str) -> str:
    """Return a digest of a file's content as it is now; UNREADABLE if this process cannot read it."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return UNREADABLE
