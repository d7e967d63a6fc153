"""Nodes of multi-head latent attention: what is done to a token before attention, caches written on the way.

Sources: the vendor's pages of npu_mla_prolog_v3 and npu_kv_rmsnorm_rope_cache, without quantisation. Both gather
neighbouring rotary numbers into halves before they turn them. Products are rounded to the input's type where the
pages name a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .interpreter import Call, node
from .nodes_cache import checked_slots
from .nodes_matrix import normalise, rotated

_PAGED = ("PA", "PA_BNSD", "PA_BSND")


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary with the pairs (0, 1), (2, 3), ... gathered into halves first; float32."""
    x = x.float()
    halves = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    return halves * cos.float() + rotated(halves, False) * sin.float()


def write(call: Call, cache: Tensor, values: Tensor, slots: Tensor, mode: str) -> None:
    """Write values [tokens, size] into a paged cache of one head, [blocks, block, 1, size] or its NZ order."""
    blocks, block = cache.shape[:2]
    flat = checked_slots(call, "index", slots, blocks * block)
    if mode in _PAGED:
        cache.view(blocks * block, -1)[flat] = values.to(cache.dtype)
    elif mode == "PA_NZ":  # each block holds [size / 16, block, 16] numbers in that order
        nz = cache.view(blocks, -1, block, 16)
        nz[flat // block, :, flat % block] = values.to(cache.dtype).view(len(values), -1, 16)
    else:
        raise call.refuse(f"cache_mode {mode!r} is not modelled, only PA, PA_BNSD, PA_BSND and PA_NZ")


@node("KvRmsNormRopeCache")
def kv_rms_norm_rope_cache(call: Call) -> tuple[Tensor | None, ...]:
    call.only("k_rope_scale", "c_kv_scale", "k_rope_offset", "c_kv_offset", "v")
    kv, gamma = call["kv"], call["gamma"]
    latent, rope = kv.split([gamma.shape[0], kv.shape[-1] - gamma.shape[0]], -1)
    normed = normalise(latent, gamma, call.attr("epsilon"))[0].to(kv.dtype)
    turned = turn(rope, call["cos"], call["sin"]).to(kv.dtype)
    mode = call.attr("cache_mode")
    for cache, values in ((call["k_cache"], turned), (call["ckv_cache"], normed)):
        if mode == "Norm":  # [B, 1, length, size], index [B, S] inside of each row
            index = call["index"]
            for row in range(len(index)):
                cache[row, 0, checked_slots(call, "index", index[row], cache.shape[2])] = values[row, 0].to(cache.dtype)
        else:
            write(call, cache, values.flatten(0, 2), call["index"], mode)
    given = (turned, normed) if call.attr("is_output_kv") else (None, None)
    return call["k_cache"], call["ckv_cache"], *given


@node("MlaPrologV3")
def mla_prolog(call: Call) -> tuple[Tensor | None, ...]:
    call.only("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")
    call.only("quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq", "actual_seq_len", "k_nope_clip_alpha")
    call.expect(weight_quant_mode=0, kv_cache_quant_mode=0, query_quant_mode=0, ckvkr_repo_mode=0)
    x = call["token_x"]
    dtype = x.dtype

    def product(a: Tensor, b: Tensor) -> Tensor:
        return (a.float() @ b.float()).to(dtype)

    uk = call["weight_uk"]  # [N, D, latent]
    heads, nope, latent = uk.shape
    cos, sin = call["rope_cos"], call["rope_sin"]
    normed = normalise(product(x, call["weight_dq"]), call["rmsnorm_gamma_cq"], call.attr("rmsnorm_epsilon_cq"))[0]
    query_norm = (normed * call.attr("qc_qr_scale")).to(dtype)
    query = product(query_norm, call["weight_uq_qr"]).unflatten(-1, (heads, -1))  # [.., N, D + Dr]
    absorbed = (query[..., :nope].unsqueeze(-2).float() @ uk.float()).squeeze(-2).to(dtype)
    query_rope = turn(query[..., nope:], cos.unsqueeze(-2), sin.unsqueeze(-2)).to(dtype)
    down = product(x, call["weight_dkv_kr"])
    key = normalise(down[..., :latent], call["rmsnorm_gamma_ckv"], call.attr("rmsnorm_epsilon_ckv"))[0]
    key = (key * call.attr("kc_scale")).to(dtype)
    key_rope = turn(down[..., latent:], cos, sin).to(dtype)
    for cache, values in ((call["kv_cache"], key), (call["kr_cache"], key_rope)):
        write(call, cache, values.reshape(-1, values.shape[-1]), call["cache_index"], call.attr("cache_mode"))
    shown = query_norm if call.attr("query_norm_flag") else None
    return absorbed, query_rope, call["kv_cache"], call["kr_cache"], None, shown, None
