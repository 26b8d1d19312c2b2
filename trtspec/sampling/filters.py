"""Temperature, top-k, top-p and min-p on `[rows, vocab]` logits, in place.

Of equally probable tokens the lower id counts as the more probable. What becomes of a row depends on no other row.
"""

from __future__ import annotations

import numpy as np

from trtspec.config import SamplingParams

GROUPS = 512
"""Maxima among which `_kth_largest` looks for a bound."""
LEAST = np.float32(-700)
"""Smaller logits, -inf among them, are raised to it for a sum of exponentials: it adds nothing to the largest one's 1,
and the exponential of -inf takes several times as long."""


def filter_logits(logits: np.ndarray, params: SamplingParams) -> None:
    """Scale by the temperature and remove what top-k, top-p and min-p, in this order, leave out.

    Args:
        logits: float32 `[rows, vocab]`, contiguous, penalised already. In place they become log-probabilities up to a
            constant per row, the largest 0, and -inf for a removed token.
        params: its temperature is more than 0.
    """
    logits -= logits.max(axis=1, keepdims=True)
    logits /= np.float32(params.temperature)
    if 0 < params.top_k < logits.shape[1]:
        keep_top_k(logits, params.top_k)
    if params.top_p < 1:
        keep_top_p(logits, params.top_p)
    if params.min_p > 0:
        np.copyto(logits, -np.inf, where=logits < np.float32(np.log(params.min_p)))


def keep_top_k(logits: np.ndarray, count: int) -> None:
    """Keep exactly the `count` most probable tokens, 1 to vocab, of each row."""
    _keep(logits, _kth_largest(logits, count), np.full(len(logits), count))


def keep_top_p(logits: np.ndarray, top_p: float) -> None:
    """Keep the fewest most probable tokens that have at least the probability `top_p`, in (0, 1), together.

    The token that reaches it is kept, so at least one is. The largest logit of each row is 0.
    """
    total = np.exp(np.maximum(logits, LEAST), dtype=np.float64).sum(axis=1, keepdims=True)
    # All tokens less probable than this have less than half of 1 - top_p together, so that the others are enough;
    # sorting these few is much cheaper than sorting a vocabulary.
    bound = np.log((1 - top_p) / (2 * logits.shape[1]) * total).astype(np.float32)
    candidates = _chosen(logits, logits >= bound)
    best = -np.sort(-candidates, axis=1)
    counts = 1 + np.count_nonzero(np.cumsum(np.exp(best, dtype=np.float64), axis=1) < top_p * total, axis=1)
    # Rounding alone may let the sum miss a top_p next to 1.
    counts = np.minimum(counts, np.count_nonzero(best > -np.inf, axis=1))
    _keep(logits, np.take_along_axis(best, counts[:, None] - 1, axis=1), counts)


def _keep(logits: np.ndarray, thresholds: np.ndarray, counts: np.ndarray) -> None:
    """Keep the `counts` largest logits, the lowest of which is the row's threshold.

    Args:
        logits: float32 `[rows, vocab]`, changed in place.
        thresholds: float32 `[rows, 1]`
        counts: integer `[rows]`
    """
    flat = logits.reshape(-1)
    kept, ends = _places(logits >= thresholds)
    values = flat[kept]
    logits.fill(-np.inf)
    flat[kept] = values
    excess = np.diff(ends) - counts
    for row in np.flatnonzero(excess):
        part = slice(ends[row], ends[row + 1])
        ties = kept[part][values[part] == thresholds[row]]
        flat[ties[-excess[row] :]] = -np.inf


def _kth_largest(logits: np.ndarray, count: int) -> np.ndarray:
    """The `count`-th largest value of each row, `[rows, 1]`.

    As many groups of tokens have a maximum of at least the `count`-th largest maximum, so no smaller value is needed.
    """
    rows, vocab = logits.shape
    bound = np.full((rows, 1), -np.inf, dtype=np.float32)
    if count <= GROUPS <= vocab:
        size = vocab // GROUPS
        maxima = logits[:, : size * GROUPS].reshape(rows, size, GROUPS).max(axis=1)
        bound = np.partition(maxima, GROUPS - count, axis=1)[:, -count, None]
    values = _chosen(logits, logits >= bound)
    return np.partition(values, values.shape[1] - count, axis=1)[:, -count, None]


def _chosen(logits: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """The chosen values of each row side by side, `[rows, most chosen of a row]`, filled up with -inf."""
    places, ends = _places(choice)
    numbers = np.diff(ends)
    chosen = np.full((len(logits), numbers.max()), -np.inf, dtype=np.float32)
    chosen[np.arange(chosen.shape[1]) < numbers[:, None]] = logits.reshape(-1)[places]
    return chosen


def _places(choice: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where bool `[rows, vocab]` is true: indices into the flat array, and where each row's begin and the last's end.

    Taking values by these is several times as fast as by the mask.
    """
    places = np.flatnonzero(choice)
    rows, vocab = choice.shape
    return places, np.searchsorted(places, np.arange(rows + 1) * vocab)
