"""The meaning of every function as a plain loop over tokens, in Python ints: what the package is held to."""

from itertools import pairwise

PAD = -1


def request_of_each_token(num_tokens, query_start_loc):
    """The request that each token belongs to, None for none."""
    request = [None] * num_tokens
    for r, (start, end) in enumerate(pairwise(query_start_loc)):
        if end < start:  # from the first entry that falls, everything is padding
            break
        for t in range(max(start, 0), min(end, num_tokens)):
            request[t] = r
    return request


def position(t, r, query_start_loc, seq_lens, positions=None):
    if positions is not None:
        return positions[t]
    query_len = query_start_loc[r + 1] - query_start_loc[r]
    return seq_lens[r] - query_len + (t - query_start_loc[r])


def state_on_rank(pos, compress_ratio, dcp_world_size, cp_interleave, dcp_rank, cp_shard):
    """The local state that holds a closing token's position, None where another rank holds it."""
    unit = pos if cp_shard == "token" else pos // compress_ratio  # what the ranks share out in runs
    if dcp_rank is not None and unit // cp_interleave % dcp_world_size != dcp_rank:
        return None
    local = unit // (cp_interleave * dcp_world_size) * cp_interleave + unit % cp_interleave
    return local // compress_ratio if cp_shard == "token" else local


def slot(index, row, block_size):
    """The slot of the index-th entry of a paged sequence, PAD where `row` has no page for it."""
    column = index // block_size
    if column >= len(row) or row[column] < 0:
        return PAD
    return row[column] * block_size + index % block_size


def compressed_slot_mapping(
    num_tokens,
    slot_mapping,
    query_start_loc,
    seq_lens,
    block_table,
    block_size,
    compress_ratio,
    out_len=None,
    dcp_world_size=1,
    cp_interleave=1,
    dcp_rank=None,
    cp_shard="token",
    positions=None,
):
    """All of `out` after the call, `out_len` entries (None: `num_tokens`)."""
    out = [PAD] * (num_tokens if out_len is None else out_len)
    for t, r in enumerate(request_of_each_token(num_tokens, query_start_loc)):
        if slot_mapping is not None and slot_mapping[t] == PAD:
            continue
        if r is None:
            continue
        pos = position(t, r, query_start_loc, seq_lens, positions)
        if pos < 0:
            continue
        if (pos + 1) % compress_ratio != 0:
            continue
        state = state_on_rank(pos, compress_ratio, dcp_world_size, cp_interleave, dcp_rank, cp_shard)
        if state is None:
            continue
        out[t] = slot(state, block_table[r], block_size)
    return out


def dspark_swa_index_width(window_size, num_speculative_tokens, alignment=64):
    width = max(window_size, 0) + max(num_speculative_tokens, 0)
    while width % alignment != 0:
        width += 1
    return width


def swa_indices(
    num_tokens,
    slot_mapping,
    query_start_loc,
    seq_lens,
    block_table,
    block_size,
    window,
    index_width,
    replay_start=None,
    causal=True,
    token_offset=0,
):
    """The index rows of tokens `token_offset ..` and the length of each row."""
    rows, lens = [], []
    requests = request_of_each_token(num_tokens, query_start_loc)
    for t in range(token_offset, num_tokens):
        r = requests[t]
        row = [PAD] * index_width
        length = 0
        if r is not None and (slot_mapping is None or slot_mapping[t] >= 0):
            if causal:
                last = position(t, r, query_start_loc, seq_lens)
                first = max(last - (window - 1), 0, replay_start[r] if replay_start else 0)
            else:
                last = seq_lens[r] - 1
                prefix_len = seq_lens[r] - (query_start_loc[r + 1] - query_start_loc[r])
                first = max(prefix_len - window, 0)
            length = min(max(last - first + 1, 0), index_width)
            for i in range(length):
                physical = slot(first + i, block_table[r], block_size)
                row[i] = physical if physical < 2**31 else PAD
        rows.append(row)
        lens.append(length)
    return rows, lens
