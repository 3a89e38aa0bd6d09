"""What can go wrong, by meaning. rolemesh/rpc/errors.py maps each to a gRPC status and back."""


class RolemeshError(Exception):
    """Any error that Rolemesh raises on purpose."""


class InvalidBatch(RolemeshError, ValueError):
    """A batch or a request is not what a method takes: a missing column, a wrong shape, a value out of range,
    an unequal duplicate, bytes that are no message."""


class InvalidConfig(RolemeshError, ValueError):
    """A job file or an override is wrong. The message names the key, the value and the way out."""


class InvalidData(RolemeshError, ValueError):
    """A data file or a row of it is not usable. The message names file and row."""


class ModelNotFound(RolemeshError, FileNotFoundError):
    """A model directory is absent, or lacks configuration, weights or tokenizer."""


WRONG_INPUT = (InvalidConfig, InvalidData, ModelNotFound)
"""What the user gave is wrong, and stays so: trying again will not help. The command line then exits with 2."""


class RewardFailed(RolemeshError, RuntimeError):
    """A reward function raised. The message names the row's uid and the function."""


class CheckpointFailed(RolemeshError, RuntimeError):
    """A checkpoint could not be written or read. The last good one is untouched."""


class UpdateFailed(RolemeshError, ArithmeticError):
    """An optimizer step could not be taken: its gradient is not finite. The weights are as before it."""


class WeightsUnavailable(RolemeshError, LookupError):
    """A version of the weights is not held, or what came is not what the manifest says."""


class Unsupported(RolemeshError, RuntimeError):
    """The role as it was started cannot do this, e.g. a critic of a job that has none."""


class NotPermitted(RolemeshError, PermissionError):
    """The caller's certificate names no role that may ask this. The message says who called, and who may."""


class RoleUnavailable(RolemeshError, ConnectionError):
    """No replica of a role answered. The message names role, addresses, method and step."""


class RoleBusy(RoleUnavailable):
    """A role has no memory left for the batch: other calls hold it. The message says how much."""


class RoleTimeout(RoleUnavailable, TimeoutError):
    """A role did not answer within its deadline."""


class RoleFailed(RolemeshError, RuntimeError):
    """A role broke in a way that nobody foresaw. The message names the error, the role's log its traceback."""
