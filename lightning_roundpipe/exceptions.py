"""The errors of this package, by who is at fault.

A wrong argument raises plain ``ValueError`` or ``TypeError``, a conflict between Trainer flags Lightning's
``MisconfigurationException``, and an exception of user code arrives unchanged with a note added. What is left are
the cases below.
"""

__all__ = [
    "BatchSplitError",
    "HostMemoryError",
    "MachineLostError",
    "MachineMismatchError",
    "PlanError",
    "RoundPipeError",
    "RoundPipeInternalError",
    "UnsupportedUseError",
    "WeightFileError",
]


class RoundPipeError(Exception):
    """Base class of the errors that only this package raises."""


class PlanError(RoundPipeError, ValueError):
    """A plan or a schedule is not valid, or none fits the limits that were given."""


class BatchSplitError(RoundPipeError, ValueError):
    """A batch cannot be cut into micro-batches, or only by a guess; the message names the part and the rule to add."""


class HostMemoryError(RoundPipeError, MemoryError):
    """Training would need more host memory than there is; the message lists what needs how much, and what helps."""


class MachineLostError(RoundPipeError, RuntimeError):
    """Another machine of the run has died, ended with an error, or does not answer; the message says during what."""


class MachineMismatchError(RoundPipeError, ValueError):
    """The machines of a run do not do the same thing; the message lists what differs."""


class WeightFileError(RoundPipeError, ValueError):
    """Files with weights are not there, are damaged, or are not those of the model; the message names file and key."""


class UnsupportedUseError(RoundPipeError, RuntimeError):
    """The model does something that cannot be streamed; the message names the unit and what to do instead."""


class RoundPipeInternalError(RoundPipeError, RuntimeError):
    """An invariant of this package was broken. This should never happen: please report it."""
