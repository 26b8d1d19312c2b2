"""Which hidden states of the target a draft head takes, and how they are normed before fc."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtspec.checkpoint.draft_head.config import EAGLE, FC, FEATURE_NORM
from trtspec.checkpoint.draft_head.reading import Reading
from trtspec.errors import CheckpointError, ConfigError

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
REMEDY = "name the boundaries with the EAGLE option aux_layers"


@dataclass(frozen=True)
class Features:
    """The target's side of a head; see DraftHeadConfig for the fields."""

    feature: str
    boundaries: tuple[int, ...]
    feature_norm: str
    has_fc: bool


def read_features(reading: Reading, hidden_size: int) -> Features:
    """The target's hidden states that the head takes.

    Raises:
        CheckpointError: the head is for another hidden size, or the number of features doesn't fit.
        ConfigError: the option aux_layers doesn't fit the head or the target.
    """
    if reading.kind == EAGLE:
        _require_equal_sizes(reading, hidden_size, "an EAGLE-1 head feeds back what it was given")
        features = Features("post_norm", (), "none", True)
        reading.findings.decide("feature", features.feature, "default", "EAGLE-1 and 2 take what enters the LM head")
        return features
    if not _uses_aux(reading):
        _require_equal_sizes(reading, hidden_size, "a head without fc takes the target's hidden state itself")
        if "aux_layers" in reading.options:
            raise ConfigError("EAGLE option aux_layers: this head has no fc and takes no layers' states; leave it out")
        reading.findings.decide("feature", "post_norm", "config", "use_aux_hidden_state is false")
        return Features("post_norm", (), "none", False)
    count = _count_features(reading, hidden_size)
    boundaries = _boundaries(reading, count)
    reading.findings.decide("feature", "boundaries", "tensor")
    return Features("boundaries", boundaries, _feature_norm(reading, count), True)


def _require_equal_sizes(reading: Reading, hidden_size: int, reason: str) -> None:
    target = reading.target.hidden_size
    stated = reading.integer("target_hidden_size") or hidden_size
    if hidden_size != target or stated != target:
        raise CheckpointError(
            f"the draft head has hidden size {hidden_size} (for a target of {stated}), the target has {target}, and "
            f"{reason}; use the head of this target"
        )


def _uses_aux(reading: Reading) -> bool:
    """Whether an EAGLE-3 head has fc over states of several layers."""
    stated = reading.flag("use_aux_hidden_state")
    if reading.has(FC):
        if stated is False:
            reading.findings.warn("config.json says use_aux_hidden_state false, but there is an fc.weight: it is used")
        return True
    if stated is not False:
        raise reading.missing(FC, "only heads with use_aux_hidden_state false have none")
    return False


def _count_features(reading: Reading, hidden_size: int) -> int:
    columns, target = reading.matrix(FC)[1], reading.target.hidden_size
    stated = reading.integer("target_hidden_size")
    if columns % target or (stated is not None and stated != target):
        raise CheckpointError(
            f"the draft head is for a target of hidden size {stated or hidden_size} (its fc.weight takes {columns} "
            f"columns), the target has {target}; use the head of this target"
        )
    count = columns // target
    for key in ("num_aux_hidden_states", "num_aux_layers"):
        value = reading.entry(key)
        if value is not None and value != count:
            reading.findings.warn(f"config.json says {key} {value}, fc.weight takes {count}: the tensor is followed")
    return count


def _boundaries(reading: Reading, count: int) -> tuple[int, ...]:
    given: tuple[int, ...] | None = reading.options.get("aux_layers")
    if given is not None:
        stated = reading.entry(LAYER_IDS)
        boundaries, origin, note = given, "option", "" if stated is None else f"config.json has ids {stated}"
    elif (ids := _layer_ids(reading)) is not None:
        boundaries, note = _from_ids(reading, ids)
        origin = "config"
    else:
        boundaries, origin, note = _default_boundaries(reading), "default", "{2, N//2, N-3} of the target's N layers"
    _check_boundaries(reading, boundaries, origin, count)
    reading.findings.decide("boundaries", boundaries, origin, note)
    return boundaries


def _layer_ids(reading: Reading) -> list[int] | None:
    ids = reading.entry(LAYER_IDS)
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or any(isinstance(k, bool) or not isinstance(k, int) for k in ids):
        raise CheckpointError(f"config.json: {LAYER_IDS} is {ids!r}, expected a list of layer numbers; {REMEDY}")
    return ids


def _from_ids(reading: Reading, ids: list[int]) -> tuple[tuple[int, ...], str]:
    """Boundaries that config.json's ids mean, and how they were read.

    Most trainers number layers, whose output is the next boundary, but speculators numbers boundaries, and so do some
    others' lists; the former are recognised by their customary first id, 1.
    """
    ordered = sorted(ids)
    if ordered != ids:
        reading.findings.warn(f"config.json: {LAYER_IDS} {ids} is not ascending; features are taken in ascending order")
    if ordered[0] != 1:
        return tuple(ordered), f"ids {ids} are boundaries"
    if reading.source_format == "eagle3-speculators":
        reading.findings.warn(
            f"config.json: {LAYER_IDS} {ids} starts with 1, where other trainers number layers and not boundaries; "
            "they are read as boundaries, as speculators does. If few drafts are accepted, add 1 to each with the "
            "EAGLE option aux_layers"
        )
        return tuple(ordered), f"ids {ids} are boundaries"
    return tuple(k + 1 for k in ordered), f"ids {ids} are layers whose outputs are taken"


def _default_boundaries(reading: Reading) -> tuple[int, ...]:
    layers = reading.target.num_layers
    if reading.source_format == "eagle3-nvidia":
        reading.findings.warn(
            f"config.json has no {LAYER_IDS} and the customary boundaries are a guess for this head; if few drafts are "
            f"accepted, {REMEDY}"
        )
    return tuple(sorted({2, layers // 2, layers - 3}))


def _check_boundaries(reading: Reading, boundaries: tuple[int, ...], origin: str, count: int) -> None:
    layers = reading.target.num_layers
    kind = ConfigError if origin == "option" else CheckpointError
    listed = ", ".join(map(str, boundaries))
    if boundaries[0] < 0 or boundaries[-1] > layers or len(set(boundaries)) != len(boundaries):
        raise kind(
            f"boundaries {listed} ({origin}) don't fit a target of {layers} layers: expected distinct ones from 0 to "
            f"{layers}; {REMEDY}"
        )
    if len(boundaries) != count:
        target = reading.target.hidden_size
        raise kind(
            f"fc.weight takes {count} features of the target's hidden size {target}, but there are {len(boundaries)} "
            f"boundaries: {listed} ({origin}); {REMEDY}, or use the head of this target"
        )


def _feature_norm(reading: Reading, count: int) -> str:
    numbered = {int(m[1]) for name in reading.tensors.tensors if (m := re.match(r"feature_norm\.(\d+)\.", name))}
    whole = reading.has(FEATURE_NORM)
    stated = {"per_feature": reading.flag("fc_norm"), "whole": reading.flag("norm_before_fc")}
    if (numbered or stated["per_feature"]) and (whole or stated["whole"]):
        raise CheckpointError(
            "the draft head has both fc_norm (one norm per feature) and input_norm (norm_before_fc), which exclude "
            "each other; is config.json this head's?"
        )
    value = "per_feature" if numbered else "whole" if whole else "none"
    if value != "none" and stated[value] is False:
        key = "fc_norm" if numbered else "norm_before_fc"
        reading.findings.warn(f"config.json says {key} false, but its norms are in the file: they are applied")
    if value == "none" and (stated["per_feature"] or stated["whole"]):
        name = "feature_norm.0.weight" if stated["per_feature"] else FEATURE_NORM
        raise reading.missing(name, "config.json asks for it")
    if numbered and numbered != set(range(count)):
        raise CheckpointError(
            f"the draft head has fc_norm {sorted(numbered)}, expected one for each of {count} features"
        )
    reading.findings.decide("feature_norm", value, "tensor")
    return value
