"""The `sample` graph: logits and each row's parameters in, tokens and log-probabilities out.

All in float32 and in this order: penalties, bans, temperature, top-k, top-p, min-p, inverse of the cumulative sum at a
given uniform number. A graph draws no random number and decides nothing; a row of temperature 0 is the argmax. Where
parameters and uniform numbers come from is the business of `sampling_state`.

Letters: S samples (several may read one row of logits), R rows of logits, V vocabulary, L log-probabilities given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..configs.sampling import MAX_LOGPROBS
from ..graph.ops.protocol import Ops


class Drawn(NamedTuple):
    """What one step gives for each of S samples."""

    token: Tensor  # [S] int32
    logprob: Tensor  # [S] float32, of the token under the raw distribution
    top_logprob: Tensor  # [S, L] float32, of the raw distribution, falling
    top_id: Tensor  # [S, L] int32; equals in rising order of id


class Sampler(nn.Module):
    """Draws one token a sample. Holds no weights and no state."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.ops = ops

    def forward(
        self,
        raw: Tensor,
        adjusted: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
        banned: Tensor,
    ) -> Drawn:
        """raw [S, V] float32: the model's logits; adjusted [S, V]: those after penalties, which are drawn from.

        temperature, top_p, min_p, uniform [S] float32; top_k [S], banned [S, n] int32. temperature 0: the argmax.
        top_k below 1, top_p 1 and min_p 0 are off. `banned` ids cannot be drawn; -1 bans none.
        """
        scores = _ban(adjusted, banned)
        best = scores.amax(dim=1, keepdim=True)
        greedy = _first(scores == best)
        is_greedy = temperature == 0
        # The largest weight is exactly 1, so no temperature overflows and min-p needs no division.
        weights = torch.exp((scores - best) / torch.where(is_greedy, 1.0, temperature)[:, None])
        weights = self.ops.likeliest(scores, weights, top_k, top_p)
        weights = torch.where(weights >= min_p[:, None], weights, 0.0)
        total = weights.cumsum(dim=1)
        sampled = (total <= uniform[:, None] * total[:, -1:]).sum(dim=1, dtype=torch.int32)
        token = torch.where(is_greedy, greedy, sampled).clamp(max=raw.shape[1] - 1)  # NaN logits must stay in range
        return Drawn(token, *_logprobs(raw, token))


class SampleStep(nn.Module):
    """What is captured: control fields by name in, results written in place, each token laid into its seat."""

    def __init__(self, ops: Ops, names: Sequence[str]) -> None:
        """`names`: the order of the control fields, those of `sampling_state.sample_fields`."""
        super().__init__()
        self.ops = ops
        self.names = tuple(names)
        self.sampler = Sampler(ops)

    def forward(
        self, fields: list[Tensor], logits: Tensor, seat_tokens: Tensor, results: list[Tensor], counts: list[Tensor]
    ) -> None:
        """logits [R, V] float32. Written in place: seat_tokens [2 * max_rows] int32 and `results`, as in `Drawn`.

        `counts` is empty, or (prompt_seen, output_count), each [2 * max_rows, V] int32 by seat: then rows are penalised
        and each drawn token is counted. Seats are distinct.
        """
        named = dict(zip(self.names, fields, strict=True))
        raw = logits.index_select(0, named["logits_row"])
        seat = named["seat"]
        adjusted = raw
        if counts:
            penalties = (named[name] for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"))
            adjusted = penalize(raw, *(count.index_select(0, seat) for count in counts), *penalties)
        parameters = (named[name] for name in ("temperature", "top_k", "top_p", "min_p", "uniform", "banned"))
        drawn = self.sampler(raw, adjusted, *parameters)
        if counts:
            place = (seat.long(), drawn.token.long())
            counts[1].index_put_(place, torch.ones_like(seat), accumulate=True)
        self.ops.put_tokens(seat_tokens, seat, drawn.token)
        for result, value in zip(results, drawn, strict=True):
            result.copy_(value)


def penalize(
    logits: Tensor,
    prompt_seen: Tensor,
    output_count: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """logits [S, V] after penalties [S]. prompt_seen, output_count [S, V] int32: of each sample's own sequence.

    Repetition sees prompt and output: positive logits are divided, negative ones multiplied. Presence and frequency see
    the output only; they are subtracted once, and once an occurrence.
    """
    in_output = output_count > 0
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(in_output | (prompt_seen > 0), repeated, logits)
    return logits - presence[:, None] * in_output - frequency[:, None] * output_count


def _ban(scores: Tensor, banned: Tensor) -> Tensor:
    """Scores with `banned` ids at -inf. Adding makes unused and repeated entries harmless, whatever their order."""
    drop = torch.where(banned < 0, 0.0, -torch.inf)
    return scores.scatter_add(1, banned.clamp(min=0).long(), drop)


def _first(mask: Tensor) -> Tensor:
    """[S, V] bool -> [S] int32: the lowest true position; V where there is none."""
    ids = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
    return torch.where(mask, ids, mask.shape[1]).amin(dim=1)


def _logprobs(raw: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of raw [S, V]: the token's log-probability [S], the L highest ones [S, L] and their ids [S, L]."""
    vocab = raw.shape[1]
    norm = raw.logsumexp(dim=1, keepdim=True)
    # Score and id as one whole number that falls in rank order, so that the choice among equals is the lowest id.
    bits = torch.where(raw == 0, 0.0, raw).view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    place = rising * 2**32 + torch.arange(vocab - 1, -1, -1, device=raw.device)
    top = place.topk(min(MAX_LOGPROBS, vocab), dim=1).values
    top_id = vocab - 1 - (top & 0xFFFFFFFF)
    chosen = raw.gather(1, token[:, None].long()) - norm
    return chosen[:, 0], raw.gather(1, top_id) - norm, top_id.to(torch.int32)
