"""What a key of the job file means to a run beside its value: facts that are declared with the key, once.

The fingerprints of roles (rolemesh/fingerprint.py), the settings that a resume compares
(services/controller/run/resume_compat.py) and the warnings of keys without effect (unused_keys.py) follow from
these facts. What an estimator, a loss or an engine takes is declared with that part, in rolemesh/catalog/.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from inspect import get_annotations
from typing import Any

from pydantic import BaseModel, Field

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config.base import section_type


class AtResume(Enum):
    """What a resume does if the key has another value than in the checkpoint's job."""

    REFUSED = "the resume is refused: the rest of the run would not be that of the old job"
    WARNED = "the run resumes and warns: the key changes what is learned, on purpose"
    DERIVED = (
        "what follows from it is compared: digests of rows and plug-ins, a role's own checkpoint, other keys"
    )
    UNCOMPARED = "nothing is compared, though numbers change: with `auto` the value may follow the device"
    FREE = "nothing is compared: it says where, how fast and until when a run computes, and what it writes"


REFUSED, WARNED, DERIVED, UNCOMPARED, FREE = AtResume
EVERY_ROLE = tuple(ROLES)


@dataclass(frozen=True)
class KeyFacts:
    """What a key means to a run.

    Args:
        at_resume: what a resume with another value does.
        read_by: the roles whose answers depend on the key, beside those of its section. A replica that was
            started with another value gets no work. tests/config/test_keys.py compares them with the code.
        content: the key names a file, whose content counts as well as its name.
        counts_if: the dotted key without which this one has no effect: false, null, 0 or empty.
    """

    at_resume: AtResume
    read_by: tuple[str, ...] = ()
    content: bool = False
    counts_if: str = ""

    def __post_init__(self) -> None:
        if unknown := {*self.read_by} - {*EVERY_ROLE}:
            raise ValueError(f"read_by names {', '.join(sorted(unknown))}; roles are {', '.join(EVERY_ROLE)}")


@dataclass(frozen=True)
class SectionFacts:
    """What holds for all keys of a section: the roles that read each of them."""

    read_by: tuple[str, ...]


def Key(
    default: Any,
    at_resume: AtResume,
    *,
    read_by: tuple[str, ...] = (),
    content: bool = False,
    counts_if: str = "",
    **field: Any,
) -> Any:
    """Declare a key: pydantic's Field with the key's facts.

    Args:
        default: its default.
        at_resume, read_by, content, counts_if: see KeyFacts.
        field: further arguments of Field: bounds, description.
    """
    declared = Field(default, **field)
    declared.metadata.append(KeyFacts(at_resume, read_by, content, counts_if))
    return declared


def Section(default: BaseModel, *, read_by: tuple[str, ...] = (), **field: Any) -> Any:
    """Declare a section whose keys are all read by some roles.

    Args:
        default: its default.
        read_by: the roles.
        field: further arguments of Field.
    """
    declared = Field(default, **field)
    declared.metadata.append(SectionFacts(read_by))
    return declared


def key_facts(schema: type[BaseModel], prefix: str = "", read_by: tuple[str, ...] = ()) -> dict[str, KeyFacts]:
    """Return the facts of every dotted key of a schema.

    A class may have a mapping FACTS with the facts of keys that it inherits, where they are not its base's.

    Args:
        schema: the class of a section.
        prefix: prefix of its keys.
        read_by: the roles that read all keys of the section.

    Raises:
        TypeError: a key is declared without facts, FACTS name one that the class does not inherit, or a key
            counts if another one is set that does not exist.
    """
    found = _collected(schema, prefix, read_by)
    for key, facts in found.items():
        if not prefix and facts.counts_if and facts.counts_if not in found:
            raise TypeError(f"key {key} counts if {facts.counts_if} is set, but there is no such key")
    return found


def _collected(schema: type[BaseModel], prefix: str, read_by: tuple[str, ...]) -> dict[str, KeyFacts]:
    found: dict[str, KeyFacts] = {}
    for name, field in schema.model_fields.items():
        inner = section_type(schema, name)
        if inner is not None:
            more = next((facts.read_by for facts in field.metadata if isinstance(facts, SectionFacts)), ())
            found |= _collected(inner, f"{prefix}{name}.", _joined(read_by, more))
            continue
        facts = _facts(schema, name)
        if facts is None:
            raise TypeError(f"key {prefix}{name} has no facts; declare it by rolemesh.config.key_facts.Key")
        found[prefix + name] = replace(facts, read_by=_joined(read_by, facts.read_by))
    return found


def _facts(schema: type[BaseModel], name: str) -> KeyFacts | None:
    """Return the facts of a key from the nearest class that declares the key or has it in its FACTS."""
    for each in schema.__mro__:
        inherited: dict[str, KeyFacts] = vars(each).get("FACTS", {})
        own = get_annotations(each)
        if unknown := [key for key in inherited if key in own or key not in schema.model_fields]:
            raise TypeError(f"FACTS of {each.__name__} name {', '.join(unknown)}, which it does not inherit")
        if name in inherited:
            return inherited[name]
        if name in own:
            metadata = schema.model_fields[name].metadata
            return next((facts for facts in reversed(metadata) if isinstance(facts, KeyFacts)), None)
    return None


def _joined(*roles: tuple[str, ...]) -> tuple[str, ...]:
    """Join roles, in the order of ROLES."""
    named = {role for each in roles for role in each}
    return tuple(role for role in EVERY_ROLE if role in named)
