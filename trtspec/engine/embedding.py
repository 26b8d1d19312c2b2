"""The embedding table: one row per token."""

from __future__ import annotations

import torch


class Embedding:
    """Looks rows up in a table `[vocab, hidden]` where it lies."""

    def __init__(self, table: torch.Tensor) -> None:
        """Nothing is copied."""
        self.table = table
        self._on_host = table.numpy() if table.is_cpu else None

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of tokens `[batch, width]` on the table's device: `[batch, width, hidden]`."""
        if self._on_host is not None:
            return torch.from_numpy(self._on_host[tokens.numpy()])
        return torch.embedding(self.table, tokens)
