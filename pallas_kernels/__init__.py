"""The arithmetic of sign compression on flat buffers."""

from pallas_kernels._choose import Implementation, check_name
from pallas_kernels._digits import digits_of_word, pack_digits, unpack_digits
from pallas_kernels._operations import average_and_recompress, compress, decompress
from pallas_kernels._packing import (
    check_block_size,
    pack_signs,
    to_blocks,
    unpack_bits,
    unpack_signs,
)
from pallas_kernels._reference import Scale, check_scale, running_mean

__all__ = [
    "Implementation",
    "Scale",
    "average_and_recompress",
    "check_block_size",
    "check_name",
    "check_scale",
    "compress",
    "decompress",
    "digits_of_word",
    "pack_digits",
    "pack_signs",
    "running_mean",
    "to_blocks",
    "unpack_bits",
    "unpack_digits",
    "unpack_signs",
]
