"""Keys that change nothing. The rule for every key of the job file: it has an effect, or it is refused with a
sentence, or the run begins with a warning: docs/decisions/0009-no-key-is-ignored-in-silence.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.config.base import Config


@dataclass(frozen=True)
class NoEffect:
    """In a field's annotation: the key is accepted since other systems' job files have it, and changes nothing.

    Args:
        reason: ends the sentence "KEY has no effect: …".
        value: only this value has none; None: no value has one.
    """

    reason: str
    value: Any = None


@dataclass(frozen=True)
class IdleKey:
    """A key that has no effect in a job.

    Args:
        key: dotted.
        is_set: by the job file or the command line.
    """

    key: str
    reason: str
    is_set: bool


def idle_keys(
    section: Config, overruled: Mapping[str, str], prefix: str = "", reason: str = ""
) -> Iterator[IdleKey]:
    """The keys that are marked with NoEffect, and those that other keys of the job overrule.

    Args:
        overruled: a dotted key, or a section with all its keys, to the reason.
        prefix: of the section's keys.
        reason: why all of the section is overruled; empty: it is not.
    """
    for name, field in type(section).model_fields.items():
        key, value = prefix + name, getattr(section, name)
        why = reason or overruled.get(key, "")
        if isinstance(value, Config):
            yield from idle_keys(value, overruled, f"{key}.", why)
            continue
        marks = [mark for mark in field.metadata if isinstance(mark, NoEffect) and mark.value in (None, value)]
        if why or marks:
            yield IdleKey(key, why or marks[0].reason, name in section.model_fields_set)


def without(data: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Nested sections without some dotted keys, in place."""
    for key in keys:
        *parents, leaf = key.split(".")
        section = data
        for part in parents:
            section = section[part]
        del section[leaf]
    return data
