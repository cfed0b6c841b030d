"""KV-cache addresses for a batch: slots of compressed states, on the CPU and on the GPU."""

from ._jit import load_at_import, reload_kernels, warmup
from .context_parallel import get_state_owner
from .plan import SlotMappingPlan, plan_compressed_slot_mappings
from .slot_mapping import PAD, CacheGroup, get_compressed_slot_mapping, get_compressed_slot_mappings
from .swa import get_dspark_swa_index_width
from .validation import validate_compressed_slot_mapping

__version__ = "0.1.0"

__all__ = [
    "PAD",
    "CacheGroup",
    "SlotMappingPlan",
    "get_compressed_slot_mapping",
    "get_compressed_slot_mappings",
    "get_dspark_swa_index_width",
    "get_state_owner",
    "plan_compressed_slot_mappings",
    "reload_kernels",
    "validate_compressed_slot_mapping",
    "warmup",
]

load_at_import()
