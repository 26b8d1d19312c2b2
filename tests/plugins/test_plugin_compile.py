"""Kernels compiled ahead of time, without a GPU."""

from __future__ import annotations

import json
import re

import pytest
from test_plugin_kernels import needs_triton, run

from trtspec.plugins.compile import CAPABILITIES

pytestmark = [needs_triton, pytest.mark.slow]

COMPILE = """
import json, sys
from trtspec.plugins.compile import examples
kernels = examples(int(sys.argv[1]))
print(json.dumps({title: {**kernel._asdict(), "threads": kernel.threads} for title, kernel in kernels.items()}))
"""
REFUSED = """
from trtspec.plugins.compile import compile_accept
try:
    compile_accept(90, nodes=3)
except RuntimeError as error:
    print(error)
"""
PARAMETERS = {
    "ngram_draft_kernel": ["history", "lengths", "columns", "tokens", "counts", "match_lengths"],
    "merge_drafts_kernel": [
        *("ngram_tokens", "ngram_counts", "eagle_tokens", "eagle_parents", "eagle_counts", "room"),
        *("tokens", "parents", "depths", "sources", "counts"),
    ],
    "accept_kernel": [
        *("tokens", "parents", "counts", "target_tokens"),
        *("rows", "num_accepted", "next_token", "num_matches"),
    ],
    "kv_commit_kernel": [
        *("cache", "starts", "rows", "num_accepted"),
        *("slots", "heads", "cache_rows", "head_dim"),
    ],
}
SCALARS = {"columns", "slots", "heads", "cache_rows", "head_dim"}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_without_spills(capability: int) -> None:
    kernels = json.loads(run("-W", "ignore", "-c", COMPILE, str(capability)))
    assert {kernel["name"] for kernel in kernels.values()} == set(PARAMETERS)
    for title, kernel in kernels.items():
        names = [name.removesuffix("_ptr") for name in kernel["parameters"]]
        assert names == PARAMETERS[kernel["name"]]
        # What a launch without triton passes is all that the entry takes.
        entry = re.search(rf"\.visible \.entry {kernel['name']}\((.*?)\)", kernel["ptx"], re.DOTALL)
        assert entry is not None
        types = re.findall(r"\.param \.(u32|u64)", entry[1])
        assert types == ["u32" if name in SCALARS else "u64" for name in names]
        target = re.search(r"\.target sm_(\d+)", kernel["ptx"])
        assert target is not None
        assert int(target[1]) == capability
        assert kernel["spill_bytes"] == 0, title
        # A thread has 255 registers, a multiprocessor 65536.
        assert kernel["registers"] * kernel["threads"] <= 65536
        assert kernel["shared_bytes"] <= 48 * 1024


def test_interpreted_kernels_are_not_compiled() -> None:
    assert "unset it to compile them" in run("-c", REFUSED, TRITON_INTERPRET="1")
