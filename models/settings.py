"""Reads a checkpoint's config.json: every key is asked for by name and type, and a wrong value is refused by name.

It knows which keys cannot change a model's numbers, and which ones do but are supported at one value only. What nobody
asked for is left in `unread`, for the load report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ..graph.ops.protocol import Activation, Heads

K = TypeVar("K")
D = TypeVar("D")

# Keys that describe the checkpoint or training and leave the numbers alone.
_HARMLESS = set(
    """
    architectures auto_map model_type torch_dtype dtype transformers_version transformers.js_config _name_or_path
    _attn_implementation use_cache initializer_range bos_token_id eos_token_id pad_token_id pretraining_tp
    attention_dropout hidden_dropout embd_pdrop resid_pdrop output_attentions output_hidden_states is_decoder
    output_router_logits router_aux_loss_coef quantization_config id2label label2id problem_type
    return_dict chunk_size_feed_forward is_llama_config
    """.split()  # noqa: SIM905 (words are easier to read)
)
# Keys that change the numbers and are supported at one value. A family that supports more asks for the key itself.
_SUPPORTED = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "attention_multiplier": None,
    "logits_scaling": 1,
    "alibi": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "use_mrope": False,
    "rope_interleaved": False,
    "compression_config": None,
}


class Settings:
    """A mapping whose keys are taken one by one."""

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = raw
        self.where = where
        self._read: set[str] = set()

    def get(self, name: str, kind: type[K], default: D) -> K | D:
        """The value of `name`, which must be a `kind` (a whole number also serves as float); `default` if none or null.

        Raises ValueError naming the key and its value.
        """
        self._read.add(name)
        value = self.raw.get(name)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)  # type: ignore[call-arg]
        if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
            raise ValueError(f"{self.where}: {name} is {value!r}; it must be of type {kind.__name__}")
        return value

    def need(self, name: str, kind: type[K]) -> K:
        """As `get`, for what has no default. Whole numbers must be at least 1."""
        value = self.get(name, kind, None)
        if value is None:
            raise ValueError(f"{self.where}: {name} is missing; the model cannot be built without it")
        if kind is int and value < 1:  # type: ignore[operator]
            raise ValueError(f"{self.where}: {name} is {value}; it must be at least 1")
        return value

    def expect(self, name: str, *supported: Any) -> Any:
        """The value of `name`, which must be one of `supported`; the first one if the key is missing."""
        self._read.add(name)
        value = self.raw.get(name, supported[0])
        if not any(value == option and type(value) in (type(option), int, float) for option in supported):
            wanted = " or ".join(repr(option) for option in supported)
            raise ValueError(f"{self.where}: {name} is {value!r}; only {wanted} is supported")
        return value

    def skip(self, *names: str) -> None:
        """Name keys that leave this family's numbers alone."""
        self._read.update(names)

    def finish(self) -> tuple[str, ...]:
        """Refuse what changes the numbers and nobody took; return the names of the keys that nothing is known of."""
        for name, value in _SUPPORTED.items():
            if name not in self._read and name in self.raw:
                self.expect(name, value, None)
        return tuple(sorted(set(self.raw) - self._read - _HARMLESS))


def read_heads(settings: Settings, hidden_size: int, *, default_dim: int | None = None) -> Heads:
    """Head counts and head size; an explicit head_dim wins over hidden_size / heads."""
    query = settings.need("num_attention_heads", int)
    kv = settings.get("num_key_value_heads", int, query)
    dim = settings.get("head_dim", int, default_dim)
    if dim is None:
        if hidden_size % query:
            raise ValueError(
                f"{settings.where}: hidden_size {hidden_size} is no multiple of num_attention_heads {query}; "
                "such a model needs head_dim"
            )
        dim = hidden_size // query
    if kv < 1 or dim < 1 or query % kv:
        raise ValueError(
            f"{settings.where}: num_attention_heads {query}, num_key_value_heads {kv}, head_dim {dim} do not fit: "
            "key/value heads must divide the query heads"
        )
    return Heads(query=query, kv=kv, dim=dim)


def read_activation(settings: Settings) -> Activation:
    """The gate's activation, by the protocol's name."""
    names: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    return names[settings.expect("hidden_act", *names)]


def read_windows(
    settings: Settings, num_layers: int, window: int | None, first: int = 0, every: int = 1
) -> tuple[int | None, ...]:
    """Each layer's sliding window: as `layer_types` says where the file has it.

    Else `window` holds from layer `first` on, in every `every`-th layer.
    """
    if window is not None and window < 1:
        raise ValueError(f"{settings.where}: sliding_window is {window}; it must be at least 1, or null for none")
    kinds = settings.get("layer_types", list, None)
    if kinds is None:
        return tuple(window if layer >= first and (layer - first) % every == 0 else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    strange = [kind for kind in kinds if kind not in known]
    if strange or len(kinds) != num_layers:
        raise ValueError(
            f"{settings.where}: layer_types names {len(kinds)} layers of kinds {sorted(set(map(str, kinds)))}; "
            f"it must name {num_layers}, each one of {list(known)}"
        )
    return tuple(known[kind] for kind in kinds)


def read_routing_size(
    settings: Settings, *names: str, top_k_name: str = "num_experts_per_tok", identity: int = 0
) -> tuple[int, int]:
    """Experts, under whichever of `names` the file has, and how many a token visits of them and `identity` more."""
    name = next((name for name in names if name in settings.raw), names[0])
    num_experts, top_k = settings.need(name, int), settings.need(top_k_name, int)
    if top_k > num_experts + identity:
        raise ValueError(f"{settings.where}: {top_k_name} is {top_k}, more than the {num_experts + identity} experts")
    return num_experts, top_k
