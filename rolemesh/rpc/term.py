"""A term: the time in which one controller has the trained roles of a run. For client and server."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote, unquote

from rolemesh.errors import InvalidBatch
from rolemesh.rpc.metadata import TERM_KEY

MAX_TERM_CHARACTERS = 6000  # gRPC limits all of a call's metadata to 8 KiB


@dataclass(frozen=True)
class Term:
    """A controller's term. Every call of a trained role carries it (metadata `rolemesh-term`).

    Args:
        run_dir: the absolute path of the run directory.
        number: grows from each term of a run directory to the next.
        controller: its process, for messages, e.g. "pid 812 on node-3".
    """

    run_dir: str
    number: int
    controller: str

    def __str__(self) -> str:
        return f"the controller {self.controller!r} of the run directory {self.run_dir!r} (term {self.number})"

    def to_metadata(self) -> str:
        """Return the metadata's value, in ASCII."""
        return quote(json.dumps(asdict(self)))

    @classmethod
    def of_call(cls, metadata: Any) -> Term | None:
        """Read the term of a call from its metadata; None: the call has none.

        Raises:
            InvalidBatch: the metadata is not a term.
        """
        text = dict(metadata or ()).get(TERM_KEY)
        if text is None:
            return None
        try:
            if len(text) > MAX_TERM_CHARACTERS:
                raise ValueError(f"{len(text)} characters")
            term = cls(**json.loads(unquote(text)))
            if [type(value) for value in asdict(term).values()] != [str, int, str]:
                raise TypeError(f"{term}")
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidBatch(
                f"metadata {TERM_KEY} must be a JSON object of run_dir, number and controller; got "
                f"{str(text)[:100]!r} ({str(error)[:100]})"
            ) from None
        return term
