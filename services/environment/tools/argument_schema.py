"""Checks the arguments of a call against the JSON schema that its tool offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema_specifications import REGISTRY
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from rolemesh.agents.tools import WrongArguments
from rolemesh.config.yaml_file import one_line

REFERENCES = ("$ref", "$dynamicRef")


class Arguments:
    """The arguments of a tool, as its schema describes them. No `$ref` is fetched.

    Raises:
        ValueError: the schema is not valid, or has a `$ref` to what is not in it.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        cls: Any = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        try:
            cls.check_schema(schema)
            _check_references(schema, cls.ID_OF(cls.META_SCHEMA))
        except jsonschema.SchemaError as error:
            raise ValueError(error.message) from error
        except Unresolvable as error:
            raise ValueError(
                f"its $ref {error.ref!r:.200} leads to nothing in the schema, and nothing is fetched; write "
                "the definition into the schema, under $defs"
            ) from error
        self._validator: Validator = cls(schema, registry=Registry())

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise WrongArguments unless the arguments fit the schema."""
        if (wrong := best_match(self._validator.iter_errors(arguments))) is not None:
            at = "".join(f"{part}: " for part in wrong.absolute_path)
            raise WrongArguments(one_line(f"{at}{wrong.message}"))


def _check_references(schema: Mapping[str, Any], dialect: str) -> None:
    """Raise Unresolvable if a reference leads out of the schema, and not to a schema of JSON Schema itself."""
    specification = specification_with(dialect, default=DRAFT202012)
    root = specification.create_resource(schema)
    left = [(root, REGISTRY.resolver_with_root(root))]
    seen: set[int] = set()
    while left:
        resource, resolver = left.pop()
        contents = resource.contents
        if not isinstance(contents, Mapping) or id(contents) in seen:
            continue
        seen.add(id(contents))
        for key in REFERENCES:
            if isinstance(reference := contents.get(key), str):
                found = resolver.lookup(reference)
                left.append((specification.create_resource(found.contents), found.resolver))
        left += [(sub, resolver.in_subresource(sub)) for sub in resource.subresources()]
