"""Other ways to the same result, with the arguments of the published function. None of them checks anything."""

import inspect

import numpy as np

try:
    import torch
except ImportError:
    torch = None

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

PAD = -1
TOKENS_PER_STEP = 1024


def numpy_formula(
    num_tokens, slot_mapping, query_start_loc, seq_lens, block_table, block_size, compress_ratio, out=None
):
    """One array operation after the other, each over all tokens."""
    if out is None:
        out = np.empty(num_tokens, np.int64)
    request = np.repeat(np.arange(len(query_start_loc) - 1), np.diff(query_start_loc))
    position = np.arange(num_tokens) + (seq_lens - query_start_loc[1:])[request]
    state = position // compress_ratio
    slot = block_table[request, state // block_size].astype(np.int64) * block_size + state % block_size
    written = ((position + 1) % compress_ratio == 0) & (slot_mapping[:num_tokens] != PAD)
    out[num_tokens:] = PAD
    out[:num_tokens] = np.where(written, slot, PAD)
    return out[:num_tokens]


def torch_formula(
    num_tokens, slot_mapping, query_start_loc, seq_lens, block_table, block_size, compress_ratio, out=None
):
    """The same in torch, eager, on either device; nothing in it waits for the GPU."""
    device = query_start_loc.device
    if out is None:
        out = torch.empty(num_tokens, dtype=torch.int64, device=device)
    starts = query_start_loc.long()
    token = torch.arange(num_tokens, device=device)
    request = torch.searchsorted(starts, token, right=True) - 1
    position = token + (seq_lens - starts[1:])[request]
    state = position // compress_ratio
    slot = block_table[request, state // block_size].long() * block_size + state % block_size
    skipped = ((position + 1) % compress_ratio != 0) | (slot_mapping[:num_tokens] == PAD)
    out[num_tokens:].fill_(PAD)
    out[:num_tokens].copy_(slot.masked_fill_(skipped, PAD))
    return out[:num_tokens]


if triton is not None:

    @triton.jit
    def _walk_request(
        slot_mapping,
        query_start_loc,
        seq_lens,
        block_table,
        block_table_row_stride,
        out,
        BLOCK_SIZE: tl.constexpr,
        COMPRESS_RATIO: tl.constexpr,
        TOKENS: tl.constexpr,
    ):
        request = tl.program_id(0).to(tl.int64)
        begin = tl.load(query_start_loc + request)
        end = tl.load(query_start_loc + request + 1)
        base = tl.load(seq_lens + request) - end
        for first in range(begin, end, TOKENS):
            token = first + tl.arange(0, TOKENS)
            position = token + base
            closes = (token < end) & ((position + 1) % COMPRESS_RATIO == 0)
            own_slot = tl.load(slot_mapping + token, mask=closes, other=-1)
            written = closes & (own_slot != -1)
            state = position // COMPRESS_RATIO
            column = block_table + request * block_table_row_stride + state // BLOCK_SIZE
            page = tl.load(column, mask=written, other=0).to(tl.int64)
            tl.store(out + token, page * BLOCK_SIZE + state % BLOCK_SIZE, mask=written)


def triton_walk(num_tokens, slot_mapping, query_start_loc, seq_lens, block_table, block_size, compress_ratio, out=None):
    """The published design: a fill, then one program a request that walks its tokens."""
    if out is None:
        out = torch.empty(num_tokens, dtype=torch.int64, device=query_start_loc.device)
    out.fill_(PAD)
    _walk_request[(query_start_loc.shape[0] - 1,)](
        slot_mapping,
        query_start_loc,
        seq_lens,
        block_table,
        block_table.stride(0),
        out,
        block_size,
        compress_ratio,
        TOKENS_PER_STEP,
    )
    return out[:num_tokens]


def vllm_function():
    """vLLM's own function, or None where no vLLM that has it with these arguments can be imported."""
    try:
        from vllm.v1.attention.backends.mla.compressor_utils import get_compressed_slot_mapping
    except Exception:  # a vLLM without its own dependencies raises anything
        return None
    takes_slot_mapping = "slot_mapping" in inspect.signature(get_compressed_slot_mapping).parameters
    return get_compressed_slot_mapping if takes_slot_mapping else None


def cpu_peers() -> dict:
    return {"NumPy formula": numpy_formula} | ({"torch formula": torch_formula} if torch else {})


def gpu_peers() -> dict:
    found = {"torch formula": torch_formula, "Triton": triton_walk if triton else None, "vLLM": vllm_function()}
    return {name: function for name, function in found.items() if function}
