"""What becomes of a draft head in a build: everything decided, nothing written."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from trtspec.checkpoint.convert import convert, usable_in_place, written_bytes
from trtspec.checkpoint.demo import packaged_head
from trtspec.checkpoint.draft_head import DraftHead, DraftHeadConfig, open_draft_head, weight_shapes
from trtspec.checkpoint.draft_head.config import EAGLE3, HEAD_LM_HEAD
from trtspec.checkpoint.source import DEMO, Checkpoint
from trtspec.checkpoint.target import EMBEDDING, LM_HEAD, TargetConfig
from trtspec.draft_vocab import DraftVocab, choose_ids, parse_draft_vocab
from trtspec.errors import CheckpointError, ConfigError
from trtspec.graph.draft_lm_head import INT4_BLOCK, check_int4
from trtspec.tensors import ITEM_SIZES
from trtspec.tokenizer import Tokenizer

DRAFT_LM_HEAD_KINDS = ("target", "int4")
# A file that holds more than this over the head's own weights (a copy of the target's tables) is not linked.
_LARGEST_SURPLUS = 1.05
Table = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class HeadRequest:
    """What the user asks of a draft head; see `engine_build.build`."""

    eagle: str | Path | None = None
    use_eagle: bool = True
    options: Mapping[str, str] = field(default_factory=dict)
    draft_vocab: int | str | Path | None = None
    draft_lm_head: str | None = None

    def __post_init__(self) -> None:
        if self.eagle is not None and not self.use_eagle:
            raise ConfigError("--eagle and --no-eagle exclude each other; leave one out")
        if self.eagle == "":
            raise ConfigError("--eagle is empty; give a draft head's directory or a hub id")
        if self.draft_lm_head not in (None, *DRAFT_LM_HEAD_KINDS):
            raise ConfigError(f"--draft-lm-head {self.draft_lm_head!r}: choose from {', '.join(DRAFT_LM_HEAD_KINDS)}")


@dataclass(frozen=True)
class HeadPlan:
    """A draft head that is to be built in: everything decided, nothing written."""

    name: str
    origin: str
    head: DraftHead
    dtype: str
    lm_head: str
    """One of engine_dir.DRAFT_LM_HEADS."""
    rows: tuple[int, ...] | None
    """Rows that are taken of the head's own LM head if it has one, else of the target's; None: all."""
    token_ids: tuple[int, ...] | None
    """The target's token id of each row that is taken; None: the identity."""

    @property
    def config(self) -> DraftHeadConfig:
        """The configuration with the draft vocabulary that is used; the ids are kept apart from it."""
        size = self.head.config.vocab_size if self.token_ids is None else len(self.token_ids)
        return dataclasses.replace(self.head.config, token_ids=None, draft_vocab_size=size)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights that are placed as they are, by canonical name."""
        shapes = weight_shapes(self.head.config)
        return {name: shape for name, shape in shapes.items() if name != HEAD_LM_HEAD or self.lm_head == "own"}

    @property
    def in_place(self) -> bool:
        """Whether the weights are linked from the head's files, which hold little else."""
        if not usable_in_place(self.head.tensors, self.shapes, self.dtype):
            return False
        ranges = [self.head.tensors.tensors[name].file_range for name in self.shapes]
        files = {at.path for at in ranges if at is not None}
        return sum(file.stat().st_size for file in files) <= _LARGEST_SURPLUS * written_bytes(self.shapes, self.dtype)

    @property
    def linked_bytes(self) -> int:
        """Bytes of the weights if they are linked, else 0."""
        return written_bytes(self.shapes, self.dtype) if self.in_place else 0

    @property
    def has_fuse(self) -> bool:
        """Whether the target's features go through a graph of their own."""
        return self.config.kind == EAGLE3 and self.config.has_fc

    @property
    def weight_bytes(self) -> int:
        """Bytes of the head without the LM head that it drafts with."""
        return written_bytes({name: at for name, at in self.shapes.items() if name != HEAD_LM_HEAD}, self.dtype)

    @property
    def lm_head_bytes(self) -> int:
        """Bytes of the LM head that it drafts with, where that is not the target's."""
        weights = self.config.draft_vocab_size * self.config.hidden_size
        if self.lm_head == "target":
            return 0
        if self.lm_head == "int4":
            return weights // 2 + weights // INT4_BLOCK * ITEM_SIZES[self.dtype]
        return weights * ITEM_SIZES[self.dtype]

    def load_rows(self, target_lm_head: Table) -> torch.Tensor:
        """The LM head's rows that are taken, `[draft_vocab, hidden]`, in the serving dtype.

        Args:
            target_lm_head: loads the target's LM head `[vocab, hidden]`.

        Raises:
            CheckpointError: they hold NaN or infinity, or overflow the dtype.
        """
        own = self.head.config.own_lm_head
        owner = f"draft head {self.name}" if own else "target"
        rows = self.head.tensors.load(HEAD_LM_HEAD) if own else target_lm_head()
        if self.rows is not None:
            rows = rows[torch.tensor(self.rows, dtype=torch.int64)]
        if not rows.isfinite().all():
            raise CheckpointError(f"{owner}: the LM head holds NaN or infinity; the checkpoint is damaged")
        return convert(f"{HEAD_LM_HEAD} of the {owner}", rows, self.dtype)


def plan_head(request: HeadRequest, checkpoint: Checkpoint, target: TargetConfig, dtype: str) -> HeadPlan | None:
    """Open the head that is asked for, or the demo target's own, and settle every choice; None: build none in.

    Raises:
        CheckpointError: the head can't be read or is not the target's.
        ConfigError: an option can't be used, or concerns a head and there is none.
    """
    vocab = None if request.draft_vocab is None else parse_draft_vocab(request.draft_vocab)
    packaged = checkpoint.origin == DEMO and request.use_eagle and request.eagle is None
    path = packaged_head() if packaged else request.eagle
    if path is None:
        _refuse_options(request)
        return None
    head = _open(path, request.options, checkpoint, target)
    token_ids = _choose_ids(vocab, head, checkpoint, target)
    lm_head = _lm_head(head.config, token_ids, request.draft_lm_head)
    if lm_head == "int4":
        check_int4(head.config.hidden_size)
    name, origin = (DEMO, DEMO) if packaged else _name_and_origin(path)
    return HeadPlan(name, origin, head, dtype, lm_head, _rows(head.config, token_ids), token_ids)


def lm_head_loader(checkpoint: Checkpoint, target: TargetConfig) -> Table:
    """Loads the target's LM head `[vocab, hidden]`."""
    return partial(checkpoint.tensors.load, EMBEDDING if target.tied else LM_HEAD)


def _refuse_options(request: HeadRequest) -> None:
    given = {
        "--eagle-option": request.options,
        "--draft-vocab": request.draft_vocab,
        "--draft-lm-head": request.draft_lm_head,
    }
    for option, value in given.items():
        if value:
            raise ConfigError(f"{option} is for a draft head, and none is built in; add --eagle HEAD")


def _open(path: str | Path, options: Mapping[str, str], checkpoint: Checkpoint, target: TargetConfig) -> DraftHead:
    tables = partial(checkpoint.tensors.load, EMBEDDING), lm_head_loader(checkpoint, target)
    try:
        return open_draft_head(path, target, options, *tables)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"draft head {path}: {error}") from None


def _name_and_origin(path: str | Path) -> tuple[str, str]:
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory.absolute().name, str(directory.absolute())
    return str(path), str(path)


def _choose_ids(
    vocab: DraftVocab | None, head: DraftHead, checkpoint: Checkpoint, target: TargetConfig
) -> tuple[int, ...] | None:
    """The target's token ids that the head may draft; None: all, in their order."""
    config = head.config
    if vocab is None:
        return config.token_ids if config.token_ids is None or config.own_lm_head else tuple(sorted(config.token_ids))
    own = config.token_ids if config.own_lm_head else None
    # A map without an LM head says which of the target's rows are worth having.
    ranking = head.ranking or (config.token_ids or () if own is None else ())
    candidates: Sequence[int] = range(target.vocab_size) if own is None else own
    tokenizer = None if vocab.corpus is None else _tokenizer(checkpoint)
    chosen = choose_ids(vocab, candidates, target.vocab_size, target.eos_token_ids, tokenizer, ranking)
    # All of them: the rows stay where they are.
    return own if len(chosen) == len(candidates) else chosen


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    with tempfile.TemporaryDirectory(prefix="trtspec-tokenizer-") as directory:
        checkpoint.save_tokenizer(Path(directory))
        return Tokenizer(Path(directory))


def _lm_head(config: DraftHeadConfig, token_ids: tuple[int, ...] | None, asked: str | None) -> str:
    """One of engine_dir.DRAFT_LM_HEADS."""
    if asked == "int4":
        return "int4"
    if config.own_lm_head:
        return "own" if token_ids == config.token_ids else "reduced"
    return "target" if token_ids is None else "reduced"


def _rows(config: DraftHeadConfig, token_ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Rows of the LM head, the head's own or the target's, that stand for these ids; None: all."""
    if token_ids is None or not config.own_lm_head or config.token_ids is None:
        return token_ids
    if token_ids == config.token_ids:
        return None
    row_of = {token: row for row, token in enumerate(config.token_ids)}
    return tuple(row_of[token] for token in token_ids)
