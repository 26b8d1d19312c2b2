"""N-gram lookup and merge by the engine of the proposal graph."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from trtspec import tensors
from trtspec.draft.device import Attributes, DeviceHistory, head_inputs, tree_at
from trtspec.draft.lookup import Lookup
from trtspec.draft.ngram import LookupAsk, Match, MergeAsk
from trtspec.draft.tree import EMPTY, DraftTree
from trtspec.engine.base import Engine
from trtspec.graph.proposal import ProposalConfig
from trtspec.sequence import Sequence

_OUTPUTS = (
    tensors.DRAFT_TOKENS,
    tensors.DRAFT_PARENTS,
    tensors.DRAFT_SOURCES,
    tensors.DRAFT_COUNTS,
    tensors.MATCH_LENGTHS,
)


class ProposalLookup:
    """Sequences with the options that the engine was built for go through it, those with others elsewhere.

    The engine looks up and merges in one run, so a sequence that verifies both drafts waits for the head's: it is
    answered by `merges` alone.
    """

    def __init__(self, engine: Engine, config: ProposalConfig, history: DeviceHistory, others: Lookup) -> None:
        """`history` has the engine's device and as many columns as its graph."""
        self._engine = engine
        self._config = config
        self._attributes = Attributes(**config.lookup.attributes)
        self._history = history
        self._others = others

    def lookups(self, asks: Seq[LookupAsk]) -> list[list[Match]]:
        """The matches of each sequence of a batch, best first; none where `merges` will run the engine."""
        served = [bool(ask.num_tokens) and self._attributes.answers(ask) for ask in asks]
        found = self._others.lookups(
            [ask._replace(num_tokens=0) if is_served else ask for ask, is_served in zip(asks, served, strict=True)]
        )
        # All branches stay whole: the tree has room for them.
        rows = {
            slot: _Row(ask.sequence, ask.num_tokens, EMPTY, self._config.size)
            for slot, (ask, is_served) in enumerate(zip(asks, served, strict=True))
            if is_served and not ask.merged
        }
        for slot, (tree, lengths) in self._run(rows).items():
            found[slot] = _branches(tree, lengths)
        return found

    def merges(self, asks: Seq[MergeAsk]) -> list[DraftTree]:
        """Both drafts of each sequence as one tree, which has no scores."""
        served = [ask for ask in asks if self._serves(ask)]
        rows = {ask.slot: _Row(ask.sequence, ask.num_tokens, ask.head_tree, ask.room) for ask in served}
        found = {slot: tree for slot, (tree, _) in self._run(rows).items()}
        others = [ask for ask in asks if ask.slot not in found]
        found.update(zip((ask.slot for ask in others), self._others.merges(others), strict=True))
        return [found[ask.slot] for ask in asks]

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()
        self._others.close()

    def _serves(self, ask: MergeAsk) -> bool:
        return bool(ask.num_tokens) and self._attributes.answers(LookupAsk(ask.sequence, ask.num_tokens))

    def _run(self, rows: Mapping[int, _Row]) -> dict[int, tuple[DraftTree, list[int]]]:
        """The engine's tree and match lengths for some slots; nothing runs where there are none."""
        if not rows:
            return {}
        batch = 1 + max(rows)
        lengths, room, limits = np.zeros((3, batch), dtype=np.int32)
        for slot, row in rows.items():
            lengths[slot], room[slot], limits[slot] = row.sequence.length, row.room, row.num_tokens
        trees = ((slot, row.head_tree) for slot, row in rows.items())
        arrays = [lengths, *head_inputs(batch, self._config.eagle_nodes, trees), room, limits[:, None]]
        sent = self._history.send(((slot, row.sequence) for slot, row in rows.items()), arrays)
        inputs = [self._history.tokens[:batch], *sent]
        names = [tensor.name for tensor in self._engine.spec.inputs]
        outputs = self._engine.run(dict(zip(names, inputs, strict=True)))
        # One copy: each makes the host wait.
        sizes = [outputs[name].numel() for name in _OUTPUTS]
        flat = torch.cat([outputs[name].flatten() for name in _OUTPUTS]).cpu()
        parts = [part.view(outputs[name].shape) for name, part in zip(_OUTPUTS, flat.split(sizes), strict=True)]
        *draft, match_lengths = (part.numpy() for part in parts)
        return {slot: (tree_at(slot, *draft), match_lengths[slot].tolist()) for slot in rows}


class _Row(NamedTuple):
    """What the engine is to do for one slot."""

    sequence: Sequence
    num_tokens: int
    """Tokens of a continuation at most."""
    head_tree: DraftTree
    room: int
    """Nodes at most."""


def _branches(tree: DraftTree, lengths: Seq[int]) -> list[Match]:
    """The matches of which a whole tree was made.

    Their first tokens are distinct, so each is a chain of its own below the root, the best one's first token first.
    """
    branch_of: list[int] = []
    for parent in tree.parents.tolist():
        branch_of.append(branch_of[parent - 1] if parent else len(set(branch_of)))
    branches = np.array(branch_of)
    return [Match(tree.tokens[branches == at], lengths[at]) for at in range(len(set(branch_of)))]
