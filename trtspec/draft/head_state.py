"""What a draft head holds of one sequence, and what waits to be given to it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from trtspec.draft.hidden_rows import copy_rows, join_rows


class HeadState:
    """Rows of one sequence in a draft head: row i pairs token i + 1 with the target's features of token i.

    `refreshed` rows are in the head's KV cache. The features of the `queued` next ones wait until a draft is wanted, so
    that steps without one cost the head nothing. Behind `max_rows` the head has no positions: it stops for good.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.refreshed = 0
        self.queued = 0
        self.stopped = False
        self._queue: list[torch.Tensor] = []

    def push(self, features: torch.Tensor, rows: Seq[int] | None = None) -> None:
        """Queue copies of the target's features `[width, features]`: of all rows, or of these, which increase."""
        rows = range(len(features)) if rows is None else rows
        count = len(rows)
        if self.stopped or self.refreshed + self.queued + count > self.max_rows:
            self._stop()
            return
        self._queue.append(copy_rows(features, rows))
        self.queued += count

    def take(self, count: int) -> torch.Tensor:
        """The first `count` queued features `[count, features]`, whose rows count as refreshed from now on."""
        waiting = join_rows(self._queue)
        self._queue = [waiting[count:]] if count < self.queued else []
        self.queued -= count
        self.refreshed += count
        return waiting[:count]

    def _stop(self) -> None:
        self.stopped = True
        self.refreshed = self.queued = 0
        self._queue.clear()
