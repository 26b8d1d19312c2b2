"""Sessions with a draft head: the target's own tokens, drafts from the target's own features, nothing loaded twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import heads
from checkpoint.heads import make_e1, make_e2, make_e3, make_e4
from draft.real_heads import OracleDrafts
from graph.head_graphs import Case, HeadGraphs
from head_targets import save_head_target

import trtspec
from trtspec.config import HEAD_CHUNK
from trtspec.draft.eagle import EagleDrafter
from trtspec.draft.tree import DraftTree
from trtspec.engine import loading
from trtspec.errors import ConfigError, EngineDirError, UserError
from trtspec.session import Session

pytestmark = pytest.mark.usefixtures("one_torch_thread")
MAX_SEQ_LEN = 96
BUILD = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": 4, "max_draft_tokens": 16}
SAMPLING = trtspec.SamplingParams(max_new_tokens=40, ignore_eos=True)
NONE = trtspec.SpeculationConfig(method="none")
CHAIN = trtspec.SpeculationConfig(method="eagle", eagle_tokens=4)
TREE = trtspec.SpeculationConfig(method="eagle", eagle_topk=3, eagle_depth=2, tree_nodes=12)
PROMPTS = [[5, 6, 7, 8, 9], [17, 3, 60, 44, 9, 9, 51], [33], list(range(3, 50))]
MARGIN = 1e-3
HEADS: dict[str, Callable[[Path], Any]] = {
    "e1": make_e1,
    "e2_token_map": lambda directory: make_e2(directory, mapped=True),
    "e3": make_e3,
    "e4_norm_output": lambda directory: make_e4(directory, config={"norm_output": True}),
}
every_head = pytest.mark.parametrize("opened", HEADS, indirect=True)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("head-target") / "target"
    save_head_target(directory)
    return directory


def build(target: Path, directory: Path, make: Callable[[Path], Any], **options: Any) -> Path:
    """An engine directory of the target and a head."""
    make(directory / "head")
    trtspec.build(target, directory / "engine", directory / "head", **{**BUILD, **options})
    return directory / "engine"


class Opened:
    """A session, and the same head for the oracle."""

    def __init__(self, session: Session, graphs: HeadGraphs) -> None:
        self.session, self.graphs = session, graphs


@pytest.fixture(scope="module")
def opened(
    request: pytest.FixtureRequest, target_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Opened]:
    directory, make = tmp_path_factory.mktemp(request.param), HEADS[request.param]
    graphs = HeadGraphs(Case(make), directory / "oracle")
    with Session.open(build(target_dir, directory, make)) as session:
        yield Opened(session, graphs)


@pytest.fixture(scope="module")
def huggingface(target_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()


def tokens_of(completions: list[trtspec.Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@every_head
@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
def test_output_is_that_without_drafting(opened: Opened, options: trtspec.SpeculationConfig) -> None:
    session = opened.session
    expected = [session.generate([prompt], SAMPLING, NONE)[0].token_ids for prompt in PROMPTS]
    alone = [session.generate([prompt], SAMPLING, options)[0] for prompt in PROMPTS]
    assert tokens_of(alone) == expected
    assert all(completion.stats.by_source["eagle"].drafts > 20 for completion in alone)
    together = session.generate([*PROMPTS, *PROMPTS[::-1]], SAMPLING, options)
    assert tokens_of(together) == expected + expected[::-1]


@every_head
def test_stops_end_the_output_as_they_do_without_drafting(opened: Opened) -> None:
    session = opened.session
    [plain] = session.generate([PROMPTS[0]], SAMPLING, NONE)
    words = plain.text.split()
    sampling = trtspec.SamplingParams(max_new_tokens=40, stop=(f"{words[9]} {words[10]}", words[25]))
    for prompts in (PROMPTS[:1], PROMPTS):
        right = session.generate(prompts, sampling, NONE)
        for options in (CHAIN, TREE):
            found = session.generate(prompts, sampling, options)
            assert [(each.text, each.token_ids, each.finish_reason) for each in found] == [
                (each.text, each.token_ids, each.finish_reason) for each in right
            ]


@every_head
def test_streams_of_different_methods_at_once(opened: Opened) -> None:
    session = opened.session
    methods = [CHAIN, trtspec.SpeculationConfig(method="ngram", ngram_min=1), TREE, NONE]
    expected = tokens_of(session.generate(PROMPTS, SAMPLING, NONE))
    streams = [session.stream(prompt, SAMPLING, method) for prompt, method in zip(PROMPTS, methods, strict=True)]
    found: list[list[int]] = [[] for _ in streams]
    for _ in range(2):
        found[0] += next(streams[0]).token_ids
    for at in (2, 1, 3, 0):
        found[at] += [token for event in streams[at] for token in event.token_ids]
    assert found == expected


@every_head
def test_drafts_come_from_the_targets_own_features(
    opened: Opened, huggingface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a session drafts is what the oracle drafts with the hidden states of transformers' model."""
    drafted: list[tuple[list[int], DraftTree]] = []
    honest = EagleDrafter.draft

    def note(self: EagleDrafter, asks: Any, rule: Any = None) -> list[DraftTree]:
        histories = [ask.sequence.history.tolist() for ask in asks]
        trees = honest(self, asks, rule)
        drafted.extend(zip(histories, trees, strict=True))
        return trees

    monkeypatch.setattr(EagleDrafter, "draft", note)
    sampling, compared = trtspec.SamplingParams(max_new_tokens=16, ignore_eos=True), 0
    for options in (CHAIN, TREE):
        drafted.clear()
        opened.session.generate(PROMPTS[:3], sampling, options)
        for history, tree in drafted[::4]:
            oracle = OracleDrafts(opened.graphs, history, features_of(huggingface, opened.graphs, history[:-1]))
            # Near the end of the output less is drafted.
            if tree.size < (4 if options is CHAIN else 12):
                continue
            if options is CHAIN:
                right: tuple[list[int], list[int]] = oracle.chain(4), list(range(4))
            else:
                right = oracle.tree(3, 2, 12)
            if oracle.margin > MARGIN:
                assert (tree.tokens.tolist(), tree.parents.tolist()) == right
                compared += 1
    assert compared > 6


def features_of(model: Any, graphs: HeadGraphs, tokens: list[int]) -> torch.Tensor:
    """The features that the head is for, from transformers, `[tokens, features]`."""
    with torch.no_grad():
        hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    boundaries = graphs.config.boundaries
    return torch.cat([hidden[b][0] for b in boundaries], dim=1) if boundaries else hidden[-1][0]


@every_head
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_features_are_the_targets(opened: Opened, huggingface: Any, prompt: list[int]) -> None:
    found, right = opened.session.features(prompt), features_of(huggingface, opened.graphs, prompt)
    assert found.shape == (len(prompt), opened.graphs.config.num_features * opened.graphs.config.target_hidden_size)
    assert float((found - right).abs().max()) < 1e-4 * float(right.abs().max())


@pytest.mark.parametrize("opened", ["e1", "e3"], indirect=True)
def test_methods_and_default(opened: Opened) -> None:
    session = opened.session
    assert session.methods == ("none", "ngram", "eagle", "ngram-eagle")
    assert session.default_method == "ngram-eagle"
    [completion] = session.generate([PROMPTS[0]], SAMPLING)
    policy = completion.metrics["policy"]
    assert sum(policy[f"{kind}_steps"] for kind in ("plain", "ngram", "eagle", "both")) == completion.stats.steps
    [ngram] = session.generate([PROMPTS[0]], SAMPLING, trtspec.SpeculationConfig(method="ngram"))
    assert ngram.metrics["stage_ms"]["eagle"] == ngram.stats.by_source["eagle"].drafts == 0


@pytest.mark.parametrize("opened", ["e1"], indirect=True)
def test_tables_and_lm_head_are_the_targets(opened: Opened) -> None:
    assert opened.session._eagle is not None
    head, target = opened.session._eagle.head, opened.session._target
    assert head._lm_head is target.lm_head
    assert head._embedding is target.embedding


@pytest.mark.parametrize("opened", ["e3"], indirect=True)
def test_a_stream_that_is_closed_frees_the_heads_state(opened: Opened) -> None:
    session = opened.session
    for _ in range(session.limits.max_batch_size + 1):
        stream = session.stream(PROMPTS[1], SAMPLING, TREE)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    [found] = session.generate([PROMPTS[2]], SAMPLING, TREE)
    assert found.token_ids == session.generate([PROMPTS[2]], SAMPLING, NONE)[0].token_ids


def test_a_directory_without_a_head_says_what_to_do(tiny_dir: Path) -> None:
    with Session.open(tiny_dir) as session:
        assert session.methods == ("none", "ngram")
        with pytest.raises(
            ConfigError, match=r"method eagle needs a draft head, .* build it with --eagle HEAD, or choose"
        ):
            session.generate([[5]], SAMPLING, CHAIN)
        assert session.generate([[5]], SAMPLING)[0].stats.by_source["eagle"].drafts == 0
        with pytest.raises(EngineDirError, match="has no draft head; build it again with --eagle HEAD"):
            loading.load_draft_head(session.engine_dir, "onnxruntime", session._target)


@pytest.mark.parametrize(
    "options", [{"draft_vocab": 20}, {"draft_lm_head": "int4"}, {"draft_vocab": 20, "draft_lm_head": "int4"}], ids=str
)
def test_cheaper_lm_heads(
    target_dir: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted: set[int] = set()
    honest = EagleDrafter.draft

    def note(self: EagleDrafter, *arguments: Any) -> list[DraftTree]:
        trees = honest(self, *arguments)
        drafted.update(token for tree in trees for token in tree.tokens.tolist())
        return trees

    monkeypatch.setattr(EagleDrafter, "draft", note)
    with Session.open(build(target_dir, tmp_path, make_e1, **options)) as session:
        expected = tokens_of(session.generate(PROMPTS, SAMPLING, NONE))
        for method in (CHAIN, TREE):
            assert tokens_of(session.generate(PROMPTS, SAMPLING, method)) == expected
    assert len(drafted) > 5
    assert drafted <= set(range(20 if "draft_vocab" in options else heads.VOCAB))


def test_a_short_head_stops_and_the_sequence_goes_on(target_dir: Path, tmp_path: Path) -> None:
    short = build(target_dir, tmp_path, lambda directory: make_e1(directory, config={"max_position_embeddings": 20}))
    sampling = trtspec.SamplingParams(max_new_tokens=60, ignore_eos=True)
    with Session.open(short) as session:
        [expected] = session.generate([PROMPTS[0]], sampling, NONE)
        for options in (CHAIN, TREE):
            [found] = session.generate([PROMPTS[0]], sampling, options)
            assert found.token_ids == expected.token_ids
            assert 0 < found.stats.drafts <= 16
        [long] = session.generate([PROMPTS[3]], sampling, TREE)
        assert long.stats.drafts == 0
        assert long.token_ids == session.generate([PROMPTS[3]], sampling, NONE)[0].token_ids


def test_closing_frees_the_heads_engines(target_dir: Path, tmp_path: Path) -> None:
    session = Session.open(build(target_dir, tmp_path, make_e3))
    session.close()
    session.close()
    with pytest.raises(UserError, match="closed"):
        session.generate([[5]])


@pytest.mark.parametrize("opened", ["e3"], indirect=True)
def test_memory_counts_the_heads_cache(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_dir, config = opened.session.engine_dir, opened.session._config
    head, device = loading.draft_head_config(engine_dir), torch.device("cpu")
    files = sum(record.size for name, record in engine_dir.files.items() if not name.startswith("tokenizer/"))
    target_cache = config.kv_bytes_per_token(4) * engine_dir.limits.cache_rows * 4
    head_cache = 2 * heads.KV_HEADS * heads.HEAD_DIM * 4 * (MAX_SEQ_LEN + HEAD_CHUNK) * 4
    monkeypatch.setattr(loading, "_free_bytes", lambda device: files + target_cache + head_cache)
    loading.check_memory(engine_dir, config, head, device)
    monkeypatch.setattr(loading, "_free_bytes", lambda device: files + target_cache + head_cache - 1)
    loading.check_memory(engine_dir, config, None, device)
    with pytest.raises(UserError, match="GB for the KV cache"):
        loading.check_memory(engine_dir, config, head, device)


@pytest.mark.parametrize("changes", [{"kind": "eagle9"}, {"boundaries": None}, {"unknown": 1}], ids=str)
@pytest.mark.parametrize("opened", ["e1"], indirect=True)
def test_a_head_described_in_unknown_terms(opened: Opened, changes: dict[str, Any]) -> None:
    engine_dir = opened.session.engine_dir
    assert engine_dir.draft_head is not None
    record = dataclasses.replace(engine_dir.draft_head, config={**engine_dir.draft_head.config, **changes})
    with pytest.raises(EngineDirError, match="describes its draft head in terms that this trtspec doesn't know"):
        loading.draft_head_config(dataclasses.replace(engine_dir, draft_head=record))
