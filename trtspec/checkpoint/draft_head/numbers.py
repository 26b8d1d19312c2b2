"""Epsilon, rotary embedding and trained length of a draft head: numbers that no tensor shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from trtspec.checkpoint.draft_head.reading import Reading
from trtspec.checkpoint.rope import RopeConfig
from trtspec.errors import CheckpointError

DEFAULT_EPSILON = 1e-6
DEFAULT_POSITIONS = 2048
OFFICIAL_THETA = 10000.0


@dataclass(frozen=True)
class Numbers:
    """The numbers that no tensor shows."""

    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int


def read_numbers(reading: Reading) -> Numbers:
    """Epsilon, rotary embedding and trained length, all from the head's own configuration, never the target's.

    Raises:
        CheckpointError: one of them is malformed or not supported.
    """
    return Numbers(_epsilon(reading), _rope(reading), _positions(reading))


def _epsilon(reading: Reading) -> float:
    asked, stated = reading.options.get("rms_norm_eps"), reading.config.get("rms_norm_eps")
    if asked is not None:
        value, origin = float(asked), "option"
    elif stated is None:
        value, origin = DEFAULT_EPSILON, "default"
        reading.findings.warn(f"config.json has no rms_norm_eps; {value} is taken (EAGLE option rms_norm_eps)")
    elif isinstance(stated, bool) or not isinstance(stated, int | float) or not 0 < stated < math.inf:
        raise CheckpointError(f"config.json: rms_norm_eps is {stated!r}, expected a number above 0")
    else:
        value, origin = float(stated), "config"
    reading.findings.decide("rms_norm_eps", value, origin)
    return value


def _positions(reading: Reading) -> int:
    asked, stated = reading.options.get("max_positions"), reading.integer("max_position_embeddings")
    if asked is not None:
        value, origin = int(asked), "option"
    elif stated is not None:
        value, origin = stated, "config"
    else:
        value, origin = DEFAULT_POSITIONS, "default"
    if value < reading.target.max_position_embeddings and origin != "option":
        reading.findings.warn(
            f"the head is made for {value} positions, the target for {reading.target.max_position_embeddings}: it "
            "stops drafting beyond (EAGLE option max_positions lets it go on)"
        )
    reading.findings.decide("max_position_embeddings", value, origin)
    return value


def _rope(reading: Reading) -> RopeConfig:
    scaling = _merged_scaling(reading)
    config = {**reading.config, "rope_parameters": scaling, "rope_scaling": None}
    try:
        rope = RopeConfig.from_hf(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: the rotary embedding's fields are malformed ({error!r})") from None
    theta_stated = scaling.get("rope_theta") or reading.config.get("rope_theta")
    theta_origin, note = ("config" if theta_stated else "default"), ""
    if "rope_theta" in reading.options:
        rope, theta_origin = dataclasses.replace(rope, theta=float(reading.options["rope_theta"])), "option"
    elif _trained_without_theta(reading, rope, scaling):
        reading.findings.warn(
            f"the official EAGLE-1 code drops rope_theta ({rope.theta:g}) where there is rope_scaling; 10000 is taken "
            "(EAGLE option rope_theta)"
        )
        rope, theta_origin, note = dataclasses.replace(rope, theta=OFFICIAL_THETA), "default", "rope_theta is not used"
    reading.findings.decide("rope_theta", rope.theta, theta_origin, note)
    scaled = "rope_scaling" not in reading.options
    origin = "option" if not scaled else "config" if scaling else "default"
    note = ""
    if rope.kind == "yarn" and reading.source_format in ("eagle3-nvidia", "eagle3-specforge"):
        note = "NVIDIA trains without scaling and writes yarn when it exports; compare with rope_scaling=none"
    reading.findings.decide("rope_scaling", rope.kind, origin, note)
    return rope


def _merged_scaling(reading: Reading) -> Mapping[str, object]:
    """rope_scaling and rope_parameters as one: config.json may have either, by age, or both."""
    old, new = (_object(reading, key) for key in ("rope_scaling", "rope_parameters"))
    if "rope_scaling" in reading.options:
        return {"rope_theta": new["rope_theta"]} if "rope_theta" in new else {}
    kinds = [value.get("rope_type") or value.get("type") for value in (old, new)]
    if all(kinds) and kinds[0] != kinds[1]:
        raise CheckpointError(
            f"config.json contradicts itself: rope_scaling is {kinds[0]}, rope_parameters {kinds[1]}; remove one"
        )
    return {**old, **new}


def _object(reading: Reading, key: str) -> Mapping[str, object]:
    value = reading.config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} is a {type(value).__name__}, expected an object")
    return value


def _trained_without_theta(reading: Reading, rope: RopeConfig, scaling: Mapping[str, object]) -> bool:
    official = reading.source_format == "eagle-official" and set(scaling) == {"type", "factor"}
    return official and rope.theta != OFFICIAL_THETA
