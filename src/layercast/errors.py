"""Every error that layercast raises, by what the caller may do about it.

Knows nothing of the rooms above it. A message says what is wrong, where, and what to do next.
"""


class LayercastError(Exception):
    """Base of every error of this package."""


class Refused(LayercastError):
    """The request can't be met as stated: a mistake on the caller's side. Mend it and call again."""


class Malformed(LayercastError):
    """Bytes from a peer or a store that are not what the protocol says. Drop the peer or the object."""


class Missing(LayercastError):
    """The bytes are not there (any more). Recompute them."""


class Full(LayercastError):
    """No room for a save. Nothing was written; serve on without it."""


class Congested(Full):
    """A peer takes bytes more slowly than they are handed over. Nothing of it was sent; send less, or later."""


class PeerLost(LayercastError):
    """The other process is gone or silent. Try another one, or recompute."""


class DeadlineExceeded(LayercastError):
    """A wait ended without its event. The work behind it is still to be settled by its owner."""


# ---- registration: the engine's tensors and groups do not fit together ----


class UnknownDtype(Refused):
    """A plane has an element type whose size layercast does not know."""


class BadPlane(Refused):
    """A plane's strides, axes or addresses can't be right."""


class LayerInTwoGroups(Refused):
    """One layer is named by two groups, so its block table is ambiguous."""


class PlaneWithoutGroup(Refused):
    """A registered plane belongs to no group, so it would never be moved."""


class WholeBlocksOnly(Refused):
    """A cut inside a block was asked of a plane whose inside is opaque along that axis."""


class LayoutMismatch(Refused):
    """Two sides do not hold the same content, so no copy between them can be right."""


class UnsupportedModel(Refused):
    """The model keeps state that can't be continued from a cache. The message says why."""


# ---- settings ----


class UnknownSetting(Refused):
    """A setting that does not exist; the message lists those that do."""


class BadSetting(Refused):
    """A setting whose value can't be used; the message says which values can."""


# ---- blocks and keys ----


class BadBlocks(Refused):
    """Block or slot ids out of range, repeated, or not as many on both sides."""


class NotCacheable(Refused):
    """A block holds content that no key can name (for example prompt embeddings without a digest)."""


class BadTransition(Refused):
    """An event that the state machine does not allow in its present state."""


# ---- outcomes of moving bytes ----


class Corrupt(Missing):
    """A digest after landing differs from the one taken at saving."""


class OutOfMemory(Refused):
    """The system refused the host memory that was asked for; the message says how much and what to lower."""


class DeviceFailed(LayercastError):
    """A call into a device's driver failed; the message names it. What it was to copy must be recomputed."""


class BrokenInvariant(LayercastError):
    """Something that always holds does not: a bug of this package. Report it with the message."""


class NoDiskSpace(Refused):
    """A folder has no room for what is to be written; the message names it, the need and what is free."""


class FolderLost(PeerLost):
    """A folder can't be read or written: taken away, forbidden or broken. The message names it and why."""
