"""What a head in training shares with its target, from the target's engine directory."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from trtspec.checkpoint.target import TargetConfig
from trtspec.engine.target import map_weight
from trtspec.engine_dir import EngineDir
from trtspec.errors import ConfigError
from trtspec.train.fit import TargetTables
from trtspec.train.head import HeadSizes
from trtspec.train.store import TrainingData

_LATER_DATA = 3
"""Data to go on with is less than what came before: its places count this many times."""


def target_tables(
    engine_dir: EngineDir, data: TrainingData, loss_vocab: int, device: torch.device, earlier: Seq[int] = ()
) -> TargetTables:
    """The target's tables, and the tokens that the loss looks at: end of sequence and the answers' most frequent ones.

    Ties, and the places that the data does not fill, go to the lower ids.

    Args:
        earlier: the ranking of other data, that of the head to start from, which counts as well.

    Raises:
        ConfigError: the data was collected with another target.
    """
    config = TargetConfig.from_json(engine_dir.target.config)
    if data.hidden_size != config.hidden_size:
        raise ConfigError(
            f"the training data has hidden states of {data.hidden_size}, the target of {config.hidden_size}; collect "
            "it with this target"
        )
    order = _merged(_by_frequency(_counts(data, config)).tolist(), earlier)
    token_ids = torch.tensor(order[:loss_vocab]).sort().values.to(device)
    embedding = map_weight(engine_dir.path, engine_dir.embedding).to(device).float()
    tied = engine_dir.lm_head == engine_dir.embedding
    lm_head = embedding if tied else map_weight(engine_dir.path, engine_dir.lm_head).to(device).float()
    return TargetTables(embedding, lm_head, token_ids)


def token_ranking(data: TrainingData, engine_dir: EngineDir, earlier: Seq[int] = ()) -> list[int]:
    """The end-of-sequence tokens, then those that occur in the answers, the most frequent first.

    Args:
        earlier: as for `target_tables`.
    """
    counts = _counts(data, TargetConfig.from_json(engine_dir.target.config))
    return _merged(_by_frequency(counts)[: int(counts.count_nonzero())].tolist(), earlier)


def _merged(ranking: list[int], earlier: Seq[int]) -> list[int]:
    """A token stands where it stood in the earlier ranking, or where this one puts it, if that is nearer the front."""
    if not earlier:
        return ranking
    places = {token: float(place) for place, token in enumerate(earlier)}
    for place, token in enumerate(ranking):
        places[token] = min(places.get(token, math.inf), _LATER_DATA * place)
    return sorted(places, key=lambda token: (places[token], token))


def _counts(data: TrainingData, config: TargetConfig) -> torch.Tensor:
    """How often each token occurs, int64 `[vocab]`; end of sequence, which the data leaves out as last, most often."""
    counts = data.token_counts(config.vocab_size)
    counts[list(config.eos_token_ids)] = counts.max() + 1
    return counts


def _by_frequency(counts: torch.Tensor) -> torch.Tensor:
    # A stable sort keeps equal counts in the order of their ids.
    return torch.argsort(counts, descending=True, stable=True)


def head_sizes(engine_dir: EngineDir, intermediate_size: int | None, rope_theta: float) -> HeadSizes:
    """A head shaped like one layer of the target."""
    config = TargetConfig.from_json(engine_dir.target.config)
    return HeadSizes(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size or config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=rope_theta,
    )
