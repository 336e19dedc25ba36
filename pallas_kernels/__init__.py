"""The arithmetic of sign compression on flat buffers."""

from pallas_kernels._choose import Implementation, check_name
from pallas_kernels._digits import digits_of_word, pack_digits, unpack_digits
from pallas_kernels._operations import average_and_recompress, compress, decompress
from pallas_kernels._packing import (
    MIN_BLOCK_SIZE,
    check_block_size,
    pack_signs,
    unpack_bits,
    unpack_signs,
)

__all__ = [
    "MIN_BLOCK_SIZE",
    "Implementation",
    "average_and_recompress",
    "check_block_size",
    "check_name",
    "compress",
    "decompress",
    "digits_of_word",
    "pack_digits",
    "pack_signs",
    "unpack_bits",
    "unpack_digits",
    "unpack_signs",
]
