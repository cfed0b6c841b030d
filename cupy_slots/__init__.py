"""KV-cache addresses for a batch: slots of compressed states, on the CPU and on the GPU."""

from ._jit import load_at_import, reload_kernels, warmup
from .context_parallel import get_state_owner
from .slot_mapping import PAD, CacheGroup, get_compressed_slot_mapping, get_compressed_slot_mappings
from .swa import get_dspark_swa_index_width

__version__ = "0.1.0"

__all__ = [
    "PAD",
    "CacheGroup",
    "get_compressed_slot_mapping",
    "get_compressed_slot_mappings",
    "get_dspark_swa_index_width",
    "get_state_owner",
    "reload_kernels",
    "warmup",
]

load_at_import()
