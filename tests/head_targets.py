"""A tiny Hugging Face target that the heads of `checkpoint.heads` are for, and engine directories of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoint import heads
from checkpoint.heads import DRAFT_VOCAB, HIDDEN, TOKEN_MAP, VOCAB, make_e1, make_e2, make_e3, make_e4
from tiny_targets import randomise

import trtspec
from trtspec.engine.target import map_weight
from trtspec.engine_build import BuildPlan, plan_build
from trtspec.engine_dir import EngineDir
from trtspec.tensors import WeightRef

EOS = 2
MAX_SEQ_LEN = 64
SMALL: dict[str, Any] = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": 2, "max_draft_tokens": 6}


def save_head_target(directory: Path, *, tied: bool = False, hidden: int = heads.HIDDEN) -> None:
    """A Llama of 8 layers with the tables that heads hold copies of, and a tokenizer of 64 words, w3 to w63."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=heads.VOCAB,
        hidden_size=hidden,
        intermediate_size=heads.INNER,
        num_hidden_layers=heads.TARGET_LAYERS,
        num_attention_heads=heads.HEADS,
        num_key_value_heads=heads.KV_HEADS,
        head_dim=heads.HEAD_DIM,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    model: Any = LlamaForCausalLM(config)
    randomise(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(heads.embedding(hidden))
        if not tied:
            model.lm_head.weight.copy_(heads.target_lm_head() if hidden == heads.HIDDEN else model.lm_head.weight)
    model.save_pretrained(directory)
    save_tokenizer(directory)


def save_tokenizer(directory: Path) -> None:
    """One token per word: <unk>, <s>, </s>, w3, w4 and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, heads.VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


@dataclasses.dataclass(frozen=True)
class Case:
    """A head and what the build makes of it."""

    make: Callable[[Path], Any]
    lm_head: str
    graphs: tuple[str, ...]
    draft_vocab: int
    token_ids: tuple[int, ...] | None = None
    own_embedding: bool = False
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


def own_lm_head(directory: Path) -> Any:
    """EAGLE-1 converted for vLLM with an LM head that is not the target's."""
    return make_e2(directory, changes={"lm_head.weight": heads.weight("another", VOCAB, HIDDEN)})


def unsorted_map(directory: Path) -> Any:
    """EAGLE-1 with an LM head of its own, whose rows are in no order."""
    rows = heads.weight("another", TOKEN_MAP, HIDDEN)
    token_map = torch.tensor(heads.token_map()[::-1])
    return make_e2(
        directory, mapped=True, lm_head_rows=TOKEN_MAP, changes={"lm_head.weight": rows, "token_map": token_map}
    )


ONE, FUSED = ("draft_head",), ("draft_head", "fuse", "draft_lm_head")
HALF = {name: tensor.half() for name, tensor in heads.e1_tensors().items()}
MAP, IDS = tuple(heads.token_map()), tuple(heads.draft_ids())
CASES: dict[str, Case] = {
    "e1": Case(make_e1, "target", ONE, VOCAB),
    "e1_safetensors": Case(lambda directory: make_e1(directory, safetensors=True), "target", ONE, VOCAB),
    "e1_two_layers": Case(lambda directory: make_e1(directory, layers=2), "target", ONE, VOCAB),
    "e1_own_embedding": Case(make_e1, "target", ONE, VOCAB, own_embedding=True, options={"embedding": "head"}),
    "e1_mixed_dtypes": Case(
        lambda directory: make_e1(directory, changes={**HALF, "fc.weight": heads.weight("fc", 32, 64).bfloat16()}),
        "target",
        ONE,
        VOCAB,
    ),
    "e2": Case(make_e2, "target", ONE, VOCAB),
    "e2_token_map": Case(
        lambda directory: make_e2(directory, mapped=True), "reduced", ("draft_head", "draft_lm_head"), TOKEN_MAP, MAP
    ),
    "e2_own_lm_head": Case(own_lm_head, "own", ("draft_head", "draft_lm_head"), VOCAB),
    "e2_unsorted_map": Case(unsorted_map, "own", ("draft_head", "draft_lm_head"), TOKEN_MAP, MAP[::-1]),
    "e3": Case(make_e3, "own", FUSED, DRAFT_VOCAB, IDS),
    "e3_whole_vocabulary": Case(lambda directory: make_e3(directory, draft_vocab=VOCAB), "own", FUSED, VOCAB),
    "e3_targets_lm_head": Case(
        lambda directory: make_e3(directory, draft_vocab=VOCAB, changes={"lm_head.weight": None}),
        "target",
        ("draft_head", "fuse"),
        VOCAB,
    ),
    "e4": Case(make_e4, "own", FUSED, DRAFT_VOCAB, IDS),
    "e4_own_embedding": Case(
        lambda directory: make_e4(directory, config={"embed_requires_grad": True}),
        "own",
        FUSED,
        DRAFT_VOCAB,
        IDS,
        own_embedding=True,
    ),
    "e4_all_norms": Case(
        lambda directory: make_e4(directory, feature_norm="per_feature", layers=2), "own", FUSED, DRAFT_VOCAB, IDS
    ),
}


class Heads:
    """The target, each case's head, and engine directories of them; each is made at most once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.target = directory / "target"
        save_head_target(self.target)
        self._built: dict[str, EngineDir] = {}

    def head(self, name: str) -> Path:
        """A case's head."""
        directory = self.directory / "heads" / name
        if not directory.exists():
            CASES[name].make(directory)
        return directory

    def plan(self, name: str, **options: Any) -> BuildPlan:
        """The plan of a build with a case's head."""
        return plan_build(self.target, eagle=self.head(name), eagle_options=CASES[name].options, **{**SMALL, **options})

    def build(self, name: str | None, **options: Any) -> EngineDir:
        """An engine directory with a case's head, or without one."""
        key = f"{name} {sorted(options.items(), key=str)}"
        if key not in self._built:
            chosen: dict[str, Any] = {}
            if name is not None:
                chosen = {"eagle": self.head(name), "eagle_options": CASES[name].options}
            output = self.directory / "out" / str(len(self._built))
            self._built[key] = trtspec.build(self.target, output, **chosen, **{**SMALL, **options})
        return self._built[key]


def load(engine_dir: EngineDir, ref: WeightRef | None) -> torch.Tensor:
    assert ref is not None
    return map_weight(engine_dir.path, ref)


def token_ids(engine_dir: EngineDir) -> list[int] | None:
    assert engine_dir.draft_head is not None
    ref = engine_dir.draft_head.token_ids
    if ref is None:
        return None
    assert (ref.dtype, ref.shape) == ("int32", (engine_dir.draft_head.config["draft_vocab_size"],))
    found: list[int] = load(engine_dir, ref).tolist()
    return found


def expected_rows(made: Heads, name: str, engine_dir: EngineDir) -> torch.Tensor:
    """The rows of the draft LM head that a directory with a case's head must have, `[draft_vocab, hidden]`."""
    plan, ids = made.plan(name).head, token_ids(engine_dir)
    assert plan is not None
    own = plan.head.config.own_lm_head
    rows = plan.head.tensors.load("lm_head.weight").float() if own else heads.target_lm_head()
    if ids is None:
        return rows
    order = list(plan.head.config.token_ids or range(VOCAB)) if own else list(range(VOCAB))
    return rows[[order.index(token) for token in ids]]
