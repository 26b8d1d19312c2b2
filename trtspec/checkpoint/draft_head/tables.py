"""Comparing a draft head's copy of a table with the target's."""

from __future__ import annotations

import torch

ROWS_AT_ONCE = 4096
# Twice bfloat16's rounding: one of the two tables may have been rounded to it.
TOLERANCE = 2.0**-7


def differing_rows(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """How two tables `[rows, columns]` differ beyond the rounding of their dtypes, in words; None if they don't."""
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)}, the target's is {list(theirs.shape)}"
    count, largest = 0, 0.0
    for start in range(0, ours.shape[0], ROWS_AT_ONCE):
        mine = ours[start : start + ROWS_AT_ONCE].float()
        other = theirs[start : start + ROWS_AT_ONCE].float().to(mine.device)
        distance = (mine - other).norm(dim=1)
        relative = distance / other.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        # Rows of zeros are as equal as float16 can tell.
        far = (relative > TOLERANCE) & (distance > torch.finfo(torch.float16).smallest_normal)
        far |= ~distance.isfinite()
        count += int(far.sum())
        largest = max([largest, *relative[far].tolist()])
    if count == 0:
        return None
    return f"{count} of {ours.shape[0]} rows differ, by up to {largest:.2g} of a row's length"
