"""Error classes by cause. rolemesh/rpc/status_codes.py maps each to a gRPC status and back."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence


class RolemeshError(Exception):
    """Any error that Rolemesh raises on purpose.

    Args:
        exit_code: status with which the command line ends.
    """

    exit_code = 1


class InvalidBatch(RolemeshError, ValueError):
    """A batch or a request is invalid for a method.

    Examples: a missing column, a wrong shape, a value out of range, unequal duplicates, bytes that are not a
    message.
    """


class InvalidConfig(RolemeshError, ValueError):
    """A job file or an override is wrong. The message names the key and the value, and says what to do.

    Args:
        findings: if several things are wrong, a sentence for each; the message has them all.
    """

    def __init__(self, *message: object, findings: Sequence[str] = ()) -> None:
        super().__init__(*message)
        self.findings = findings


class InvalidData(RolemeshError, ValueError):
    """A data file or one of its rows is unusable. The message names file and row."""


class UnknownAgent(InvalidData):
    """No agent has the name that a row's agent_name says. The message has the known ones."""


class ModelNotFound(RolemeshError, FileNotFoundError):
    """A model directory is missing, or lacks configuration, weights or tokenizer."""


class HubUnavailable(RolemeshError, ConnectionError):
    """The Hugging Face Hub did not answer, or failed. The message names what was wanted; a retry may help."""


WRONG_INPUT = (InvalidConfig, InvalidData, ModelNotFound)
"""Errors in the user's input, which a retry cannot fix. The command line exits with status 2."""

# Errors of the system that are about the input: a name, a kind of file, a permission, an empty file. Others may
# pass, such as EIO and ESTALE of NFS, or EMFILE.
_INPUT_ERRNOS = {
    errno.ENOENT,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.EINVAL,
}
_OF_RUST = re.compile(r"\(os error (\d+)\)")  # in the text of errors of safetensors and tokenizers


def unreadable(wrong: type[RolemeshError], error: BaseException, message: str) -> Exception:
    """Return the error to raise for input that could not be read: wrong input, or an I/O error.

    Args:
        wrong: the class for wrong input.
        error: of the library that reads it. It may have an I/O error as its cause or context.
        message: of the error.

    Returns:
        An OSError if an I/O error is behind it, and else one of class `wrong`.
    """
    numbers = {_number(each) for each in chain(error)} - {None}
    return OSError(message) if numbers - _INPUT_ERRNOS else wrong(message)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it: its cause or context, theirs, and so on."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = _OF_RUST.search(str(error))
    return int(found[1]) if found else None


class RewardFailed(RolemeshError, RuntimeError):
    """A reward function raised, died or took too long. The message names the row's uid and the function."""


class EnvironmentFailed(RolemeshError, RuntimeError):
    """A conversation's environment raised, took too long, or said something invalid. The message names the
    row's uid and the agent."""


class EpisodeLost(RolemeshError, LookupError):
    """A replica does not have an episode: it was started anew, has given the episode up, or is gone. The
    episode can begin anew, with the next attempt."""


class CheckpointFailed(RolemeshError, RuntimeError):
    """A checkpoint could not be written or read. The last good one is untouched."""


class UpdateFailed(RolemeshError, ArithmeticError):
    """An optimizer step was skipped because its gradient is not finite. The weights are as before it."""


class WeightsUnavailable(RolemeshError, LookupError):
    """A version of the weights is not held, or the received bytes do not match the manifest."""


class Unsupported(RolemeshError, RuntimeError):
    """The role's configuration does not support this, e.g. a call to the critic of a job that has none."""


class NotPermitted(RolemeshError, PermissionError):
    """The caller's certificate names no role that may call this. The message says who called, and who may."""


class RoleTaken(RolemeshError, RuntimeError):
    """Another controller has the trained role. The message names it, its run directory, and the caller."""


class RoleUnavailable(RolemeshError, ConnectionError):
    """No replica of a role answered. The message names role, addresses, method and step."""


class RoleBusy(RoleUnavailable):
    """A role has no memory left for the batch, because other calls hold it. The message says how much."""


class RoleTimeout(RoleUnavailable, TimeoutError):
    """A role did not answer within its deadline, or a request was silent for too long."""


class RoleFailed(RolemeshError, RuntimeError):
    """A role failed unexpectedly, or it gave an invalid answer, or a part of a plug-in raised. The log of the
    process has the traceback.

    Attributes:
        status: the gRPC status of a server that named no class of error; None: it named one, or none was sent.
    """

    status: object = None
