"""Sliding-window attention: the width of a row of window indices."""

from __future__ import annotations

from ._integers import as_int, int_at_least


def get_dspark_swa_index_width(window_size: int, num_speculative_tokens: int, *, alignment: int = 64) -> int:
    """Width of a draft block's row of sliding-window indices.

    A token of a non-causal draft block reads the window before the block and the block itself; the attention
    kernel reads rows in steps of `alignment`.

    Parameters
    ----------
    window_size : int
        Tokens in the window. Below 0 counts as 0.
    num_speculative_tokens : int
        Draft tokens of a request. Below 0 counts as 0.
    alignment : int
        The width is a multiple of it; published engines use 64, 128 or 512.

    Returns
    -------
    int
        ``max(window_size, 0) + max(num_speculative_tokens, 0)``, rounded up to a multiple of `alignment`.

    Raises
    ------
    TypeError
        For a number that is not integral, or is a bool.
    ValueError
        For an `alignment` below 1.

    Examples
    --------
    >>> get_dspark_swa_index_width(128, 4)
    192
    >>> get_dspark_swa_index_width(512, 5, alignment=512)
    1024

    Notes
    -----
    The rule of vLLM 0.33's function of this name, with the alignment made an argument.
    """
    alignment = int_at_least("alignment", alignment, 1)
    window_size = as_int("window_size", window_size)
    num_speculative_tokens = as_int("num_speculative_tokens", num_speculative_tokens)
    width = max(window_size, 0) + max(num_speculative_tokens, 0)
    return -(-width // alignment) * alignment
