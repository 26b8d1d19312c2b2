"""Norms, residual and feedback of a draft head, which its tensors alone don't settle."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.checkpoint.draft_head.config import EAGLE, EMBEDDING_NORM, FIRST_INPUT_NORM, HIDDEN_NORM, OUTPUT_NORM
from trtspec.checkpoint.draft_head.reading import Reading
from trtspec.errors import CheckpointError, ConfigError, UserError

LAYERNORM_FORMATS = ("speculators-eagle", "eagle-norms")


@dataclass(frozen=True)
class Wiring:
    """Where a head has norms and what it adds and feeds back; see DraftHeadConfig for the fields."""

    embedding_norm: bool
    hidden_norm: bool
    input_norm: bool
    residual: str
    output_norm: bool
    feedback: str
    double_hidden_norm: bool = False


def read_wiring(reading: Reading) -> Wiring:
    """Norms, residual and feedback.

    Raises:
        CheckpointError: config.json contradicts itself, or asks for a norm that isn't there.
        ConfigError: an option contradicts the head.
    """
    return _eagle_wiring(reading) if reading.kind == EAGLE else _eagle3_wiring(reading)


def _eagle_wiring(reading: Reading) -> Wiring:
    layernorms = reading.flag("layernorms") if reading.source_format in LAYERNORM_FORMATS else None
    embedding_norm = _optional_norm(reading, "embedding_norm", EMBEDDING_NORM, layernorms)
    hidden_norm = _optional_norm(reading, "hidden_norm", HIDDEN_NORM, None)
    input_norm = _slot_norm(reading, "input_norm", FIRST_INPUT_NORM, "skip_prenorm", layernorms)
    output_norm = _slot_norm(reading, "output_norm", OUTPUT_NORM, "skip_output_norm", layernorms)
    reading.findings.decide("residual", "raw", "default")
    feedback = _eagle_feedback(reading, output_norm)
    return Wiring(embedding_norm, hidden_norm, input_norm, "raw", output_norm, feedback)


def _optional_norm(reading: Reading, field: str, tensor: str, layernorms: bool | None) -> bool:
    """A norm on one input of fc, which files have only where it is used."""
    stated = reading.flag("add_para_norm") if layernorms is None else layernorms
    present = reading.has(tensor)
    if present and layernorms is False:
        reading.leave_out(tensor, "config.json says layernorms false")
        present = False
    elif present and stated is False:
        reading.findings.warn(
            f"config.json says add_para_norm false, but there is {reading.name(tensor)}: it is applied"
        )
    elif stated and not present:
        raise reading.missing(tensor, f"config.json says {'add_para_norm' if layernorms is None else 'layernorms'}")
    reading.findings.decide(field, present, "config" if layernorms is False else "tensor")
    return present


def _slot_norm(reading: Reading, field: str, tensor: str, skip_key: str, layernorms: bool | None) -> bool:
    """A norm that EAGLE-1 does not have, and whose weight may be in the file without being used."""
    if field in reading.options:
        active, origin = bool(reading.options[field]), "option"
    elif (skip := reading.flag(skip_key)) is not None:
        active, origin = not skip, "config"
    elif layernorms is not None:
        active, origin = layernorms, "config"
    elif reading.source_format in LAYERNORM_FORMATS and reading.has(tensor) and _is_layernorm(reading.name(tensor)):
        active, origin = True, "tensor"
    else:
        active, origin = False, "default"
    if active and not reading.has(tensor):
        raise _absent(reading, field, tensor, origin, "config.json asks for it")
    if not active and reading.has(tensor):
        reason = {"option": f"option {field} is false", "config": "config.json says so"}.get(
            origin, f"an EAGLE-1 head doesn't apply it unless config.json says {skip_key} false (option {field})"
        )
        reading.leave_out(tensor, reason)
    reading.findings.decide(field, active, origin)
    return active


def _is_layernorm(name: str) -> bool:
    """Whether a name is one of those that only heads with extra norms have."""
    return "hidden_layernorm" in name or "lm_head_layernorm" in name or "transformer." in name


def _eagle_feedback(reading: Reading, output_norm: bool) -> str:
    asked = reading.options.get("norm_output")
    if asked is not None:
        _require_output_norm(output_norm, asked)
        value, origin, note = "post_norm" if asked else "pre_norm", "option", ""
    elif not output_norm:
        value, origin, note = "pre_norm", "default", "there is no output norm: what enters the LM head is fed back"
    elif reading.source_format in LAYERNORM_FORMATS:
        value, origin, note = "pre_norm", "default", "the norm belongs to the LM head (lm_head_layernorm)"
    else:
        value, origin, note = "post_norm", "default", "vLLM feeds back what enters the LM head"
    if output_norm and origin == "default":
        reading.findings.warn(
            f"nothing in the file says whether the output norm comes before what is fed back; {value} is taken: if few "
            "drafts are accepted, try the EAGLE option norm_output"
        )
    reading.findings.decide("feedback", value, origin, note)
    return value


def _eagle3_wiring(reading: Reading) -> Wiring:
    residual = _residual(reading)
    output_norm = _output_norm(reading)
    feedback = _eagle3_feedback(reading, output_norm)
    double = bool(reading.options.get("double_hidden_norm", False))
    if double:
        reading.findings.decide("double_hidden_norm", True, "option", "experimental")
    return Wiring(True, True, False, residual, output_norm, feedback, double)


def _residual(reading: Reading) -> str:
    asked, trainer = reading.options.get("norm_before_residual"), reading.source_format
    if asked is not None:
        normed, origin = asked, "option"
    elif (stated := reading.flag("norm_before_residual")) is not None:
        normed, origin = stated, "config"
    else:
        normed, origin = False, "default"
    if origin == "default" and trainer == "eagle3-speculators":
        reading.findings.warn(
            "config.json has no norm_before_residual, whose default differs between speculators (false, taken here) "
            "and vLLM (true); set it with the EAGLE option norm_before_residual"
        )
    if origin == "config" and normed and trainer != "eagle3-speculators":
        reading.findings.warn(
            "config.json says norm_before_residual true, which exporters also write for heads trained without it; if "
            "few drafts are accepted, try the EAGLE option norm_before_residual=false"
        )
    value = "normed" if normed else "raw"
    reading.findings.decide("residual", value, origin)
    return value


def _output_norm(reading: Reading) -> bool:
    present, asked = reading.has(OUTPUT_NORM), reading.options.get("output_norm")
    if asked is not None:
        active, origin = bool(asked), "option"
    elif present:
        active, origin = True, "tensor"
        if reading.flag("use_last_layernorm") is False:
            reading.findings.warn(
                "config.json says use_last_layernorm false, but there is a norm.weight: it is applied (EAGLE option "
                "output_norm=false leaves it out)"
            )
    else:
        active, origin = reading.flag("use_last_layernorm") is not False, "config"
    if active and not present:
        reason = "only heads with use_last_layernorm false have none"
        raise _absent(reading, "output_norm", OUTPUT_NORM, origin, reason)
    if present and not active:
        reading.leave_out(OUTPUT_NORM, "option output_norm is false")
    reading.findings.decide("output_norm", active, origin)
    return active


def _eagle3_feedback(reading: Reading, output_norm: bool) -> str:
    asked = reading.options.get("norm_output")
    if asked is not None:
        _require_output_norm(output_norm, asked)
        normed, origin = asked, "option"
    elif (stated := reading.flag("norm_output", "return_hidden_post_norm")) is not None:
        normed, origin = stated, "config"
        if normed and not output_norm:
            raise CheckpointError(
                "config.json asks to feed back the normed hidden state (norm_output), but the head has no output norm; "
                "set the EAGLE option norm_output=false"
            )
    else:
        normed, origin = False, "default"
    if origin == "config" and normed and reading.source_format == "eagle3-specforge":
        reading.findings.warn(
            "config.json says norm_output true, which in heads that SpecForge exported before September 2026 did not "
            "concern what is fed back; if few drafts are accepted, try the EAGLE option norm_output=false"
        )
    value = "post_norm" if normed else "pre_norm"
    reading.findings.decide("feedback", value, origin)
    return value


def _absent(reading: Reading, field: str, tensor: str, origin: str, reason: str) -> UserError:
    if origin == "option":
        return ConfigError(f"EAGLE option {field}=true: the draft head has no {reading.name(tensor)}; leave it out")
    return reading.missing(tensor, reason)


def _require_output_norm(output_norm: bool, asked: bool) -> None:
    if asked and not output_norm:
        raise ConfigError("EAGLE option norm_output=true: this head has no output norm; leave the option out")
