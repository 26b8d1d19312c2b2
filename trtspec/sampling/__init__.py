"""From logits to tokens. All ties go to the lowest id."""

from trtspec.sampling.choose import greedy, top_k
from trtspec.sampling.logprobs import TokenLogprob, token_logprobs
from trtspec.sampling.sampler import Sampler

__all__ = ["Sampler", "TokenLogprob", "greedy", "token_logprobs", "top_k"]
