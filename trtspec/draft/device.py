"""N-gram lookup and merge on the device: histories stay there, only what is new goes up and only drafts come back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from trtspec.draft.ngram import LookupAsk, Match, MergeAsk, NgramDrafter
from trtspec.draft.tree import EMPTY, DraftTree
from trtspec.plugins.definition import LONGEST_MATCH, MergedDraft, NgramDraft
from trtspec.sequence import Sequence

_ALIGNMENT = 4
"""Elements: parts of one transfer begin at multiples of 16 bytes, because kernels are compiled anew for pointers that
do and pointers that don't."""
MOST_KERNELS = 16
"""Kinds of options that a session compiles kernels for: anybody's requests may have others."""
MOST_BRANCHES = 16
"""Branches that kernels are compiled for."""
MOST_ITEMS = 1024
"""What the merge compares with each other: the root, all branches' tokens and the head's."""
_Array = TypeVar("_Array", np.ndarray, torch.Tensor)
Shape = tuple[int, ...]


class Operations(Protocol):
    """The calls that `trtspec.plugins.reference` and `trtspec.plugins.kernels.launch` have in common."""

    def ngram_draft(
        self,
        history: torch.Tensor,
        lengths: torch.Tensor,
        *,
        ngram_min: int,
        ngram_max: int,
        num_tokens: int,
        branches: int = 1,
        latest: int = 0,
        out: NgramDraft | None = None,
    ) -> NgramDraft:
        """See `trtspec.plugins.definition`."""
        ...

    def merge_drafts(
        self,
        ngram_tokens: torch.Tensor,
        ngram_counts: torch.Tensor,
        eagle_tokens: torch.Tensor,
        eagle_parents: torch.Tensor,
        eagle_counts: torch.Tensor,
        room: torch.Tensor,
        *,
        size: int,
        out: MergedDraft | None = None,
    ) -> MergedDraft:
        """See `trtspec.plugins.definition`."""
        ...


class Attributes(NamedTuple):
    """The attributes of `ngram_draft`."""

    ngram_min: int
    ngram_max: int
    num_tokens: int
    branches: int
    latest: int

    @classmethod
    def of(cls, ask: LookupAsk, num_tokens: int) -> Attributes:
        """What an ask's options say, with continuations of `num_tokens`."""
        options = ask.sequence.speculation
        latest = int(options.ngram_occurrence == "latest")
        return cls(options.ngram_min, options.ngram_max, num_tokens, options.ngram_branches, latest)

    def answers(self, ask: LookupAsk) -> bool:
        """Whether the continuations, cut to what is asked for, are those that the host finds.

        They aren't where `latest` asks for less, since it prefers places that so many tokens follow, nor where n
        beyond LONGEST_MATCH decide. The host finds fewer branches where many matches go on alike: see `find_branches`.
        """
        asked = Attributes.of(ask, ask.num_tokens)
        fits = ask.num_tokens == self.num_tokens or (not self.latest and ask.num_tokens < self.num_tokens)
        return fits and self.ngram_max <= LONGEST_MATCH and asked._replace(num_tokens=self.num_tokens) == self


class DeviceHistory:
    """The committed tokens of all slots on the device."""

    def __init__(self, slots: int, columns: int, device: torch.device) -> None:
        """`columns`: tokens of a sequence at most."""
        self.tokens = torch.zeros((slots, columns), dtype=torch.int32, device=device)
        """int32 `[slots, columns]`; what lies behind a sequence's length is undefined."""
        self._held: list[tuple[Sequence | None, int]] = [(None, 0)] * slots

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.tokens.device

    def send(self, sequences: Iterable[tuple[int, Sequence]], arrays: Seq[np.ndarray]) -> list[torch.Tensor]:
        """Bring some slots up to date, and take arrays to the device, all in one transfer.

        Args:
            sequences: slots and who is there now. Sequences only grow, so a slot that held the same one lacks the
                tokens behind what it held; another one's it lacks all.
            arrays: integer, of any shape.

        Returns:
            The arrays as int32 tensors.
        """
        columns, new, places = self.tokens.shape[1], [], []
        for slot, sequence in sequences:
            holder, length = self._held[slot]
            start, stop = length if holder is sequence else 0, sequence.length
            if start < stop:
                new.append(sequence.tokens[start:stop])
                places.append(np.arange(slot * columns + start, slot * columns + stop))
                self._held[slot] = sequence, stop
        parts = [np.concatenate(new), np.concatenate(places), *arrays] if new else arrays
        sent = unpack(torch.from_numpy(pack(parts)).to(self.device), [part.shape for part in parts])
        if new:
            self.tokens.view(-1).index_copy_(0, sent[1].long(), sent[0])
        return sent[2:] if new else sent


class DeviceLookup:
    """Looks up and merges with the operations on the device, a batch at a time.

    What the operations define otherwise than the host's lookup is looked up there, see `Attributes.answers`: drafts do
    not depend on where they are made. So is what would take kernels of unusual sizes, or very many different ones.
    """

    def __init__(self, history: DeviceHistory, max_draft_tokens: int, operations: Operations) -> None:
        """`max_draft_tokens`: of a sequence; operations are compiled for it."""
        self._history = history
        self._size = max(max_draft_tokens, 1)
        self._operations = operations
        self._host = NgramDrafter()
        self._launched: set[Attributes] = set()

    def lookups(self, asks: Seq[LookupAsk]) -> list[list[Match]]:
        """The matches of each sequence of a batch, best first; one launch for each kind of options."""
        found: list[list[Match]] = [[] for _ in asks]
        groups: dict[Attributes, list[int]] = {}
        for slot, ask in enumerate(asks):
            attributes = self._attributes_of(ask) if ask.num_tokens else None
            if attributes is not None:
                groups.setdefault(attributes, []).append(slot)
            elif ask.num_tokens:
                found[slot] = self._host.matches(ask.sequence, ask.num_tokens)
        if groups:
            for slots, (tokens, counts, lengths) in zip(groups.values(), self._look_up(asks, groups), strict=True):
                for slot in slots:
                    found[slot] = _matches_of(tokens[slot], counts[slot], lengths[slot], asks[slot].num_tokens)
        return found

    def merges(self, asks: Seq[MergeAsk]) -> list[DraftTree]:
        """Both drafts of each sequence as one tree; one launch for all that have both, whose trees have no scores."""
        both = [at for at, ask in enumerate(asks) if ask.matches and ask.head_tree.size and self._fits(ask)]
        merged = dict(zip(both, self._merge([asks[at] for at in both]) if both else (), strict=True))
        return [merged[at] if at in merged else self._host.merges([ask])[0] for at, ask in enumerate(asks)]

    def close(self) -> None:
        """Nothing is held but memory."""

    def _fits(self, ask: MergeAsk) -> bool:
        return 1 + (ask.sequence.speculation.ngram_branches + 1) * self._size <= MOST_ITEMS

    def _merge(self, asks: Seq[MergeAsk]) -> list[DraftTree]:
        sent = self._history.send((), _merge_inputs(asks, self._size))
        shapes: list[Shape] = [(len(asks), self._size)] * 4 + [(len(asks),)]
        flat = sent[0].new_empty(packed_size(shapes))
        self._operations.merge_drafts(*sent, size=self._size, out=MergedDraft._make(unpack(flat, shapes)))
        tokens, parents, _, sources, counts = unpack(flat.cpu().numpy(), shapes)
        return [tree_at(at, tokens, parents, sources, counts) for at in range(len(asks))]

    def _attributes_of(self, ask: LookupAsk) -> Attributes | None:
        """The attributes to launch with; None where the host has to look.

        Kernels are compiled for a number of tokens: where it decides nothing else, the longest continuations are cut.
        """
        usual = min(ask.sequence.speculation.ngram_tokens, self._size)
        choices = (Attributes.of(ask, num_tokens) for num_tokens in (self._size, usual))
        found = next((attributes for attributes in choices if attributes.answers(ask)), None)
        if found is None or found.branches > MOST_BRANCHES:
            return None
        if found not in self._launched and len(self._launched) >= MOST_KERNELS:
            return None
        self._launched.add(found)
        return found

    def _look_up(self, asks: Seq[LookupAsk], groups: Mapping[Attributes, list[int]]) -> list[list[np.ndarray]]:
        """Each group's tokens, counts and match lengths, of the slots from 0 on; those of other groups are empty."""
        batch = 1 + max(slot for slots in groups.values() for slot in slots)
        lengths = np.zeros((len(groups), batch), dtype=np.int32)
        for group, slots in enumerate(groups.values()):
            lengths[group, slots] = [asks[slot].sequence.length for slot in slots]
        sequences = [(slot, asks[slot].sequence) for slots in groups.values() for slot in slots]
        sent = self._history.send(sequences, list(lengths))
        shapes: list[Shape] = []
        for attributes in groups:
            rows = batch, attributes.branches
            shapes += (*rows, attributes.num_tokens), rows, rows
        flat = sent[0].new_empty(packed_size(shapes))
        outputs = unpack(flat, shapes)
        for group, attributes in enumerate(groups):
            out = NgramDraft._make(outputs[3 * group : 3 * group + 3])
            self._operations.ngram_draft(self._history.tokens[:batch], sent[group], **attributes._asdict(), out=out)
        # The one place where the host waits.
        drafts = unpack(flat.cpu().numpy(), shapes)
        return [drafts[start : start + 3] for start in range(0, len(drafts), 3)]


def tree_at(at: int, tokens: np.ndarray, parents: np.ndarray, sources: np.ndarray, counts: np.ndarray) -> DraftTree:
    """One of the trees of `merge_drafts`, whose outputs are int32 `[batch, size]` and `[batch]`."""
    count = int(counts[at])
    return DraftTree(tokens[at, :count], parents[at, :count], sources[at, :count].astype(np.int8)) if count else EMPTY


def head_inputs(batch: int, nodes: int, trees: Iterable[tuple[int, DraftTree]]) -> tuple[np.ndarray, ...]:
    """EAGLE's tokens and parents, int32 `[batch, nodes]`, and counts, int32 `[batch]`.

    Args:
        trees: where they stand in the batch, and what the head proposed.
    """
    tokens, parents = np.zeros((2, batch, nodes), dtype=np.int32)
    counts = np.zeros(batch, dtype=np.int32)
    for at, tree in trees:
        tokens[at, : tree.size], parents[at, : tree.size], counts[at] = tree.tokens, tree.parents, tree.size
    return tokens, parents, counts


def pack(arrays: Seq[np.ndarray]) -> np.ndarray:
    """All arrays in one, int32 `[packed_size]`, each where `unpack` looks for it."""
    shapes = [array.shape for array in arrays]
    packed = np.zeros(packed_size(shapes), dtype=np.int32)
    for part, array in zip(unpack(packed, shapes), arrays, strict=True):
        part[...] = array
    return packed


def unpack(packed: _Array, shapes: Seq[Shape]) -> list[_Array]:
    """Views of these shapes."""
    parts, start = [], 0
    for shape in shapes:
        parts.append(packed[start : start + math.prod(shape)].reshape(shape))
        start += _aligned(shape)
    return parts


def packed_size(shapes: Seq[Shape]) -> int:
    """Elements of what `unpack` takes."""
    return sum(map(_aligned, shapes))


def _aligned(shape: Shape) -> int:
    return -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT


def _matches_of(tokens: np.ndarray, counts: np.ndarray, lengths: np.ndarray, num_tokens: int) -> list[Match]:
    """The branches of one sequence, int32 `[R, K]`, `[R]` and `[R]`, each cut to `num_tokens`."""
    branches = zip(tokens, counts.tolist(), lengths.tolist(), strict=True)
    return [Match(branch[: min(count, num_tokens)], length) for branch, count, length in branches if count]


def _merge_inputs(asks: Seq[MergeAsk], size: int) -> list[np.ndarray]:
    """The inputs of `merge_drafts` with continuations and head trees of at most `size` tokens."""
    batch, branches = len(asks), max(ask.sequence.speculation.ngram_branches for ask in asks)
    tokens = np.zeros((batch, branches, size), dtype=np.int32)
    counts = np.zeros((batch, branches), dtype=np.int32)
    for at, ask in enumerate(asks):
        for branch, match in enumerate(ask.matches):
            counts[at, branch] = length = len(match.continuation)
            tokens[at, branch, :length] = match.continuation
    room = np.array([ask.room for ask in asks], dtype=np.int32)
    return [tokens, counts, *head_inputs(batch, size, ((at, ask.head_tree) for at, ask in enumerate(asks))), room]
