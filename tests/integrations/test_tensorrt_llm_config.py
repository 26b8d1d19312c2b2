"""Which TensorRT-LLM fields a method becomes, and what is named as having no equivalent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoint.heads import BOUNDARIES, make_e1, make_e3, make_e4, target_config

from trtspec.checkpoint.draft_head import open_draft_head
from trtspec.config import SpeculationConfig
from trtspec.errors import ConfigError
from trtspec.integrations.tensorrt_llm_config import Export, ExportedHead, export

# What each class of TensorRT-LLM 1.4.0rc4 takes, of which it forbids others; only what concerns drafting.
BASE = {"decoding_type", "max_draft_len", "max_total_draft_tokens", "speculative_model", "max_concurrency"}
FIELDS = {
    "NGram": BASE | {"max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"},
    "Eagle3": BASE | {"use_dynamic_tree", "dynamic_tree_max_topK", "eagle3_layers_to_capture", "sa_config"},
}
LAYERS = [boundary - 1 for boundary in BOUNDARIES]


def read(directory: Path, lm_head: str = "own", **options: str) -> ExportedHead:
    head = open_draft_head(directory, target_config(), options)
    decisions = {decision.name: decision.to_json() for decision in head.decisions}
    return ExportedHead("owner/head", head.config, decisions, lm_head)


@pytest.fixture
def head(tmp_path: Path) -> ExportedHead:
    make_e3(tmp_path / "head")
    return read(tmp_path / "head")


def fields_of(made: Export) -> dict[str, Any]:
    """The speculative fields, checked against what their class takes, and against what the YAML says."""
    assert yaml.safe_load(made.to_yaml()) == made.config
    fields: dict[str, Any] = made.config["speculative_config"]
    assert set(fields) <= FIELDS[fields["decoding_type"]]
    return fields


def make(head: ExportedHead | None = None, **options: Any) -> Export:
    return export(SpeculationConfig(**options), head)


def test_ngram() -> None:
    made = make(method="ngram", ngram_tokens=7, ngram_max=4, ngram_min=1)
    assert fields_of(made) == {
        "decoding_type": "NGram",
        "max_draft_len": 7,
        "max_matching_ngram_size": 4,
        "is_keep_all": True,
        "is_use_oldest": True,
        "is_public_pool": False,
    }
    assert made.config["disable_overlap_scheduler"] is True
    assert [line.split(":")[0] for line in made.missing] == ["--ngram-occurrence earliest"]


def test_what_ngram_cannot_express() -> None:
    made = make(method="ngram", ngram_min=3, ngram_occurrence="latest", ngram_branches=2)
    assert fields_of(made)["is_use_oldest"] is False
    assert [line.split(":")[0] for line in made.missing] == [
        "--ngram-min 3",
        "--ngram-occurrence latest",
        "--ngram-branches 2",
    ]


def test_none_is_plain_decoding(head: ExportedHead) -> None:
    made = make(head, method="none")
    assert yaml.safe_load(made.to_yaml()) == {"speculative_config": None}
    assert (made.missing, made.summary) == ((), "no speculative decoding")


def test_eagle_chain(head: ExportedHead) -> None:
    made = make(head, method="eagle", eagle_tokens=4)
    assert fields_of(made) == {
        "decoding_type": "Eagle3",
        "speculative_model": "owner/head",
        "max_draft_len": 4,
        "eagle3_layers_to_capture": LAYERS,
    }
    assert made.missing == ()
    assert made.summary == "Eagle3, max_draft_len 4"


@pytest.mark.parametrize(
    ("topk", "depth", "nodes", "length", "total", "lines"),
    [
        (4, 3, 15, 4, 15, 0),
        (4, 3, 16, 4, 16, 0),
        (2, 1, 15, 2, 4, 1),
        (8, 5, 3, 3, 3, 0),
        (2, 0, 2, 1, 2, 0),
    ],
)
def test_eagle_tree(head: ExportedHead, topk: int, depth: int, nodes: int, length: int, total: int, lines: int) -> None:
    made = make(head, method="eagle", eagle_topk=topk, eagle_depth=depth, tree_nodes=nodes)
    fields = fields_of(made)
    assert fields["use_dynamic_tree"] is True
    assert fields["dynamic_tree_max_topK"] == topk
    assert (fields["max_draft_len"], fields["max_total_draft_tokens"]) == (length, total)
    # TensorRT-LLM refuses others.
    assert length <= total <= topk * length
    assert len(made.missing) == lines
    assert all("--tree-nodes" in line for line in made.missing)


def test_both_drafters(head: ExportedHead) -> None:
    made = make(head, hybrid_ngram_min=6)
    assert made.method == "ngram-eagle"
    assert fields_of(made) == {
        "decoding_type": "Eagle3",
        "speculative_model": "owner/head",
        "max_draft_len": 3,
        "eagle3_layers_to_capture": LAYERS,
        "sa_config": {"threshold": 6, "enable_global_pool": False},
    }
    assert [line.split(":")[0] for line in made.missing] == [
        "--merge auto",
        "--ngram-tokens 10",
        "--ngram-min 2, --ngram-max 5",
    ]
    assert "Eagle3 with suffix automaton" in made.summary


def test_what_both_drafters_cannot_express(head: ExportedHead) -> None:
    made = make(
        head,
        method="ngram-eagle",
        merge="union",
        ngram_tokens=4,
        ngram_occurrence="latest",
        ngram_branches=3,
        eagle_topk=2,
        eagle_depth=3,
    )
    fields = fields_of(made)
    assert "use_dynamic_tree" not in fields
    assert fields["max_draft_len"] == 4
    assert [line.split(":")[0] for line in made.missing] == [
        "--merge union",
        "--ngram-min 2, --ngram-max 5",
        "--ngram-occurrence latest",
        "--ngram-branches 3",
        "--eagle-topk 2",
    ]
    assert any(line.startswith("--merge exclusive: the head runs") for line in make(head, merge="exclusive").missing)


def test_an_eagle_1_head_leaves_the_lookup(tmp_path: Path) -> None:
    make_e1(tmp_path / "head")
    old = read(tmp_path / "head")
    made = make(old)
    assert (made.method, fields_of(made)["decoding_type"]) == ("ngram", "NGram")
    assert "owner/head is left out" in made.missing[0]
    for method in ("eagle", "ngram-eagle"):
        with pytest.raises(ConfigError, match="EAGLE-1 or 2 head"):
            make(old, method=method)
    assert not any("head" in line for line in make(old, method="ngram").missing)


def test_without_a_head() -> None:
    assert make().method == "ngram"
    with pytest.raises(ConfigError, match="needs an EAGLE-3 head; add --eagle HEAD"):
        make(method="eagle")


def test_what_tensorrt_llm_does_otherwise_with_a_head(tmp_path: Path) -> None:
    flags = {"norm_before_residual": True, "norm_output": True}
    make_e4(tmp_path / "head", feature_norm="per_feature", config=flags)
    made = make(read(tmp_path / "head", "int4", aux_layers="1,4,8", rope_theta="5000"), method="eagle")
    assert fields_of(made)["eagle3_layers_to_capture"] == [0, 3, 7]
    text = "\n".join(made.missing)
    for words in ("file format (eagle3-speculators)", "norm_before_residual", "norms of the target's features"):
        assert words in text
    assert "--eagle-option for rope_theta" in text
    assert "4-bit draft LM head" in text
    assert "boundaries" not in text


def test_reduced_vocabulary(head: ExportedHead) -> None:
    reduced = ExportedHead(head.model, head.config, head.decisions, "reduced")
    assert any("reduced draft vocabulary" in line for line in make(reduced, method="eagle").missing)


def test_a_head_that_takes_embeddings_is_refused(tmp_path: Path) -> None:
    make_e3(tmp_path / "head")
    with pytest.raises(ConfigError, match="boundary 0"):
        make(read(tmp_path / "head", aux_layers="0,4,5"), method="eagle")


def test_comments_are_one_line_each() -> None:
    odd = "a\nb: c"
    made = Export("ngram", {"speculative_config": {"speculative_model": odd}}, ("x",))
    assert yaml.safe_load(made.to_yaml())["speculative_config"]["speculative_model"] == odd
    lines = make(method="ngram", ngram_branches=2).to_yaml().splitlines()
    assert lines[3] == "# No equivalent:"
    assert sum(line.startswith("# - ") for line in lines) == 3
