"""The errors that zpp raises beside ValueError and TypeError.

ValueError and TypeError say that an argument is wrong: they are raised before anything is sent, and
nothing has changed. The classes below say that something happened between ranks.
"""


class ZppError(RuntimeError):
    """Base of every error that is not about one rank's arguments."""


class MismatchError(ZppError):
    """Ranks called the same collective with different settings, shapes or dtypes."""


class PeerError(ZppError):
    """A collective could not finish: a peer died, stalled past the timeout, or left the group."""


class StaleSecondaryError(ZppError):
    """A secondary partition was used for a version of the weights that it does not hold."""


class UnavailableError(ZppError):
    """A back end (kernel library, device kind) that the call needs is not there."""
