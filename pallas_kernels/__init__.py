"""The arithmetic of sign compression on flat buffers."""

from pallas_kernels._choose import Implementation as Implementation
from pallas_kernels._choose import check_name as check_name
from pallas_kernels._digits import digits_of_word as digits_of_word
from pallas_kernels._digits import pack_digits as pack_digits
from pallas_kernels._digits import unpack_digits as unpack_digits
from pallas_kernels._operations import average_and_recompress as average_and_recompress
from pallas_kernels._operations import compress as compress
from pallas_kernels._operations import decompress as decompress
from pallas_kernels._packing import MIN_BLOCK_SIZE as MIN_BLOCK_SIZE
from pallas_kernels._packing import check_block_size as check_block_size
from pallas_kernels._packing import pack_signs as pack_signs
from pallas_kernels._packing import unpack_bits as unpack_bits
from pallas_kernels._packing import unpack_signs as unpack_signs
