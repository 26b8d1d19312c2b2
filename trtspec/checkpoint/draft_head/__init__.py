"""Reading EAGLE draft heads of any writer as one canonical record."""

from trtspec.checkpoint.draft_head.config import DraftHeadConfig, weight_shapes
from trtspec.checkpoint.draft_head.format import is_draft_head
from trtspec.checkpoint.draft_head.opening import DraftHead, describe, open_draft_head
from trtspec.checkpoint.draft_head.options import OPTIONS
from trtspec.checkpoint.draft_head.reading import Decision
from trtspec.checkpoint.draft_head.token_ids import RANKING

__all__ = [
    "OPTIONS",
    "RANKING",
    "Decision",
    "DraftHead",
    "DraftHeadConfig",
    "describe",
    "is_draft_head",
    "open_draft_head",
    "weight_shapes",
]
