"""Soft cross-entropy against the target's distribution, with few logits in memory at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

# Logits of this many rows exist at once.
_CHUNK = 1024


def probabilities(hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """The LM head's softmax over its rows, `[rows, vocab]` in its dtype, of hidden states `[rows, hidden]`."""
    parts = [(rows.to(lm_head.dtype) @ lm_head.T).float().softmax(-1) for rows in torch.split(hidden, _CHUNK)]
    return torch.cat([part.to(lm_head.dtype) for part in parts])


def soft_cross_entropy(
    student: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor, lm_head: torch.Tensor
) -> torch.Tensor:
    """Sum over the student's rows of -sum(p * log q), q being the LM head's softmax on them.

    Args:
        student: `[rows, hidden]`; the only argument that gets a gradient.
        targets: distributions p, `[any, vocab]`, as `probabilities` gives them.
        rows: int64 `[rows]`: which of `targets` belongs to each row.
        lm_head: `[vocab, hidden]`, in the dtype to multiply in.
    """
    loss: torch.Tensor = _SoftCrossEntropy.apply(student, targets, rows, lm_head)  # type: ignore[no-untyped-call]
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    """Computes the gradient in the forward pass: no logits outlive a chunk."""

    @staticmethod
    def forward(
        ctx: Any, student: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor, lm_head: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        gradients = []
        for ours, wanted in zip(torch.split(student, _CHUNK), torch.split(rows, _CHUNK), strict=True):
            log_q = (ours.to(lm_head.dtype) @ lm_head.T).float().log_softmax(-1)
            p = targets[wanted].float()
            total -= torch.dot(p.flatten(), log_q.flatten())
            gradients.append(log_q.exp_().sub_(p).to(lm_head.dtype) @ lm_head)
        ctx.save_for_backward(torch.cat(gradients).to(student.dtype))
        return total.to(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (of_student,) = ctx.saved_tensors
        return of_student * gradient, None, None, None
