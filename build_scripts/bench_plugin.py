"""Time of lookup and merge in the plain torch reference, by batch and history.

python build_scripts/bench_plugin.py --batch 1 --batch 8

`growth` is the time over that of the history a quarter as long; `long runs` are constant histories, in which every
place matches as far as a match is told.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import click
import torch

from trtspec.plugins.definition import MergedDraft
from trtspec.plugins.reference import merge_drafts, ngram_draft

LENGTHS = (1024, 4096, 16384)
NUM_TOKENS, NODES, SIZE = 10, 15, 25


def histories(batch: int, length: int, kind: str) -> torch.Tensor:
    """int32 `[batch, length]`; text is random tokens that end with a copy of earlier ones."""
    if kind == "long runs":
        return torch.full((batch, length), 7, dtype=torch.int32)
    tokens = torch.randint(0, 2000, (batch, length), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    tokens[:, -12:] = tokens[:, length // 2 : length // 2 + 12]
    return tokens


def step_of(history: torch.Tensor, branches: int) -> Callable[[], MergedDraft]:
    """One draft of every sequence, from inputs that are there already."""
    batch, length = history.shape
    lengths, nodes, room = (torch.full((batch,), n, dtype=torch.int32) for n in (length, NODES, SIZE))
    chain = torch.arange(NODES, dtype=torch.int32).repeat(batch, 1)

    def step() -> MergedDraft:
        draft = ngram_draft(history, lengths, ngram_min=2, ngram_max=5, num_tokens=NUM_TOKENS, branches=branches)
        return merge_drafts(draft.tokens, draft.counts, chain, chain, nodes, room, size=SIZE)

    return step


@click.command(help=__doc__)
@click.option("--batch", "batches", type=click.IntRange(min=1), multiple=True, default=(1, 8), show_default=True)
@click.option("--branches", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--repeats", type=click.IntRange(min=3), default=200, show_default=True)
def main(batches: tuple[int, ...], branches: int, repeats: int) -> None:
    torch.set_num_threads(1)
    click.echo("| history | batch | tokens | median ms | least ms | growth |\n|---|---:|---:|---:|---:|---:|")
    for kind in ("text", "long runs"):
        for batch in batches:
            before = None
            for length in LENGTHS:
                step = step_of(histories(batch, length, kind), branches)
                times = []
                for _ in range(repeats):
                    start = perf_counter()
                    step()
                    times.append(1000 * (perf_counter() - start))
                growth = f"{min(times) / before:.2f}" if before else ""
                before = min(times)
                click.echo(f"| {kind} | {batch} | {length} | {median(times):.3f} | {before:.3f} | {growth} |")


if __name__ == "__main__":
    main()
