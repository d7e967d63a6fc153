"""Multi-head latent attention as DeepSeek and LongCat have it: the part of a layer between two norms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from ..configs.cache import CacheGroup, CachePart
from ..graph.inputs import StepInputs
from ..graph.ops.protocol import LayerCache, Ops, Rotary
from ..graph.ops.protocol_latent import LatentHeads, LatentQuery, LatentWeights
from .blocks import CachePlace
from .model import Load, load_linear, load_vector, vector
from .rotary import RotarySettings, yarn_mscale
from .settings import Settings

LATENT_EPS = 1e-6  # of the norms of latents, whatever config.json says of the others


class LatentAttention(nn.Module):
    """Attention over the latent cache, absorbed in both phases."""

    def __init__(
        self,
        ops: Ops,
        hidden_size: int,
        heads: LatentHeads,
        place: CachePlace,
        scale: float,
        *,
        q_rank: int | None,
        bias: bool = False,
        q_gain: float = 1.0,
        kv_gain: float = 1.0,
    ) -> None:
        """`bias`: of the projections down and out. `q_gain`, `kv_gain`: of the normed latents, kept in their norms."""
        super().__init__()
        self.ops, self.heads, self.place, self.scale = ops, heads, place, scale
        self.bias, self.q_gain, self.kv_gain = bias, q_gain, kv_gain
        q_size = heads.query * (heads.nope + heads.rope)
        self.down_sizes = (q_rank or q_size, heads.rank + heads.rope)
        self.down, self.q_up = ops.latent_linears(hidden_size, q_rank, heads, bias=bias)
        self.q_norm = None if q_rank is None else vector(ops, q_rank)
        self.kv_norm = vector(ops, heads.rank)
        self.key_up = ops.head_linear(heads.query, heads.nope, heads.rank)
        self.value_up = ops.head_linear(heads.query, heads.rank, heads.value)
        self.out = ops.linear(heads.query * heads.value, [hidden_size], bias=bias)

    def forward(self, x: Tensor, rotary: Rotary, caches: Sequence[LayerCache], step: StepInputs) -> Tensor:
        """[T, C] -> [T, C]; the step's latents are written into this layer's cache."""
        query = self.query(x, rotary, caches, step)
        return self.attend(query, caches, step)

    def query(self, x: Tensor, rotary: Rotary, caches: Sequence[LayerCache], step: StepInputs) -> LatentQuery:
        """The first half: queries made, cache written."""
        weights = LatentWeights(self.down, self.q_norm, self.q_up, self.kv_norm, self.key_up, LATENT_EPS)
        cache, slots = caches[self.place.number], step.groups[self.place.group].slot_mapping
        return self.ops.latent_query(x, weights, self.heads, rotary, cache, slots)

    def attend(
        self, query: LatentQuery, caches: Sequence[LayerCache], step: StepInputs, selected: Tensor | None = None
    ) -> Tensor:
        """The second half: [T, C]."""
        cache, group = caches[self.place.number], self.place.group
        latent = self.ops.latent_attention(query, cache, step, group, scale=self.scale, selected=selected)
        return self.out(self.value_up(latent).flatten(1))

    def weights(self, name: str) -> Iterator[Load]:
        """From tensors under `name`, as DeepSeek names them."""
        q_down, kv_down = self.down_sizes
        q_name = f"{name}.q_proj" if self.q_up is None else f"{name}.q_a_proj"
        parts = [(q_name, q_down), (f"{name}.kv_a_proj_with_mqa", kv_down)]
        yield load_linear("attention", self.down, parts, bias=self.bias)
        if self.q_norm is not None and self.q_up is not None:
            yield load_vector("norms", self.q_norm, f"{name}.q_a_layernorm.weight", self.q_gain)
            yield load_linear("attention", self.q_up, [(f"{name}.q_b_proj", self.q_up.out_features)])
        yield load_vector("norms", self.kv_norm, f"{name}.kv_a_layernorm.weight", self.kv_gain)
        yield self._load_up(f"{name}.kv_b_proj.weight")
        yield load_linear("attention", self.out, [(f"{name}.o_proj", self.out.out_features)], bias=self.bias)

    def _load_up(self, name: str) -> Load:
        """One stored matrix [H * (nope + value), R]: its key rows, turned round, and its value rows."""
        heads = self.heads

        def put(stored: Tensor) -> None:
            key, value = stored.view(heads.query, -1, heads.rank).split([heads.nope, heads.value], dim=1)
            self.key_up.load(key.transpose(1, 2))
            self.value_up.load(value)

        shape = (heads.query * (heads.nope + heads.value), heads.rank)
        return Load("attention", [(name, shape)], put, [self.key_up, self.value_up])


def read_latent_heads(settings: Settings) -> tuple[LatentHeads, int | None]:
    """Head sizes and the query rank, None where queries are not compressed."""
    settings.skip("num_key_value_heads", "head_dim", "qk_head_dim")  # all follow from what is read here
    heads = LatentHeads(
        query=settings.need("num_attention_heads", int),
        nope=settings.need("qk_nope_head_dim", int),
        rope=settings.need("qk_rope_head_dim", int),
        value=settings.need("v_head_dim", int),
        rank=settings.need("kv_lora_rank", int),
    )
    return heads, settings.get("q_lora_rank", int, None)


def latent_scale(heads: LatentHeads, rotary: RotarySettings) -> float:
    """The softmax scale; yarn with mscale_all_dim sharpens it."""
    sharpened = yarn_mscale(rotary.factor, rotary.mscale_all_dim) if rotary.mscale_all_dim else 1.0
    return (heads.nope + heads.rope) ** -0.5 * sharpened**2


def latent_group(heads: LatentHeads, num_caches: int, index_dim: int = 0) -> CacheGroup:
    """The cache of latent layers: R + rope numbers a token a layer, and an indexer's key where there is one."""
    parts = [CachePart(name="nope", heads=1, dim=heads.rank), CachePart(name="rope", heads=1, dim=heads.rope)]
    if index_dim:
        parts.append(CachePart(name="index", heads=1, dim=index_dim))
    return CacheGroup(kind="latent", layers=(tuple(parts),) * num_caches)
