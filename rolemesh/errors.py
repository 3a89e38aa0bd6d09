"""Error classes by cause. rolemesh/rpc/errors.py maps each to a gRPC status and back."""


class RolemeshError(Exception):
    """Any error that Rolemesh raises on purpose."""


class InvalidBatch(RolemeshError, ValueError):
    """A batch or a request is invalid for a method.

    Examples: a missing column, a wrong shape, a value out of range, unequal duplicates, bytes that are not a
    message.
    """


class InvalidConfig(RolemeshError, ValueError):
    """A job file or an override is wrong. The message names the key and the value, and says what to do."""


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


class RoleUnavailable(RolemeshError, ConnectionError):
    """No replica of a role answered. The message names role, addresses, method and step."""


class RoleBusy(RoleUnavailable):
    """A role has no memory left for the batch, because other calls hold it. The message says how much."""


class RoleTimeout(RoleUnavailable, TimeoutError):
    """A role did not answer within its deadline."""


class RoleFailed(RolemeshError, RuntimeError):
    """A role failed unexpectedly, or it gave an invalid answer, or a part of a plug-in raised. The log of the
    process has the traceback.

    Attributes:
        status: the gRPC status of a server that named no class of error; None: it named one, or none was sent.
    """

    status: object = None
