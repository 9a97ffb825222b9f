"""zpp: ZeRO++ communication compression for PyTorch.

Importing this touches no GPU, no MPI and no process group.
"""

from zpp import operators, zero3
from zpp.communicator import Communicator
from zpp.errors import MismatchError, PeerError, StaleSecondaryError, UnavailableError, ZppError
from zpp.format import BlockFormat, Code, Formats, Noise, Rounding, ScaleType
from zpp.parted import PartedTensor
from zpp.secondary import SecondaryPartition
from zpp.topology import Axis, Topology
from zpp.version import __version__

__all__ = [
    "Axis",
    "BlockFormat",
    "Code",
    "Communicator",
    "Formats",
    "MismatchError",
    "Noise",
    "PartedTensor",
    "PeerError",
    "Rounding",
    "ScaleType",
    "SecondaryPartition",
    "StaleSecondaryError",
    "Topology",
    "UnavailableError",
    "ZppError",
    "__version__",
    "operators",
    "zero3",
]
