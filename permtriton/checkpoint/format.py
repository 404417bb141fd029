"""In which formats are pruned weights stored, and what does each mean?"""

from enum import StrEnum


class Format(StrEnum):
    """How a folder stores its pruned weights."""

    PACKED = "packed"
    DENSE = "dense"
    PLAIN = "plain"


MEANINGS = {
    Format.PACKED: "kept values and positions, 9/16 of the dense size at 2:4 and 16 bits; loads after import "
    "permtriton",
    Format.DENSE: "zeros stored too",
    Format.PLAIN: "dense, or refused where transformers alone cannot load it (layout fused)",
}
HELP = " ".join(f"{each}: {meaning}." for each, meaning in MEANINGS.items())
