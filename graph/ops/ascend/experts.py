"""Expert layers: a gate that chooses, tokens sorted by expert, one grouped product for all experts, results mixed.

Every choice of every token is routed, because the vendor's pages want group sizes that sum to the rows and every row
to have a place. So a choice that computes nothing (of padding, or a token passed on as it is) goes to expert 0 with
whatever comes of it left out: it costs a row in a product, not an expert's weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..protocol import Activation
from ..protocol_experts import ClampedSwiglu, Routing
from .base import AscendBase
from .linear import empty

_MOST_EXPERTS = 2048  # that npu_moe_gating_top_k takes


def activate(both: Tensor, activation: Activation | ClampedSwiglu) -> Tensor:
    """[T, 2F], the gate first -> [T, F]: one node."""
    if isinstance(activation, ClampedSwiglu):
        return torch.ops.npu.npu_clipped_swiglu(
            both, dim=-1, alpha=activation.alpha, limit=activation.limit, bias=1.0, interleaved=False
        )
    if activation == "silu":
        return torch.ops.npu.npu_swiglu(both, -1)
    return torch.ops.npu.npu_geglu(both, -1, 1, True)[0]  # 1: by tanh; True: the first half is the gate


class AscendExperts(nn.Module):
    """E gated feed-forwards: gate_up [E, C, 2F] with the gate first, down [E, F, C], biases float32."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        activation: Activation | ClampedSwiglu,
        bias: bool,
        identity: int,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.num_experts, self.width, self.activation, self.identity = num_experts, width, activation, identity
        self.gate_up = empty(num_experts, hidden_size, 2 * width, dtype=dtype, device=device)
        self.down = empty(num_experts, width, hidden_size, dtype=dtype, device=device)
        bias_dtype = torch.float16 if dtype == torch.float16 else torch.float32  # as npu_grouped_matmul pairs them
        self.gate_up_bias = empty(num_experts, 2 * width, dtype=bias_dtype, device=device) if bias else None
        self.down_bias = empty(num_experts, hidden_size, dtype=bias_dtype, device=device) if bias else None

    def load_gate_up(self, expert: int, gate: Tensor, up: Tensor, biases: Sequence[Tensor] = ()) -> None:
        """gate and up [F, C], biases (gate's, up's) [F]."""
        assert len(biases) == (0 if self.gate_up_bias is None else 2), "biases differ from those it was made for"
        with torch.no_grad():
            self.gate_up[expert, :, : self.width].copy_(gate.T)
            self.gate_up[expert, :, self.width :].copy_(up.T)
            if self.gate_up_bias is not None:
                self.gate_up_bias[expert].copy_(torch.cat(tuple(biases)))

    def load_down(self, expert: int, down: Tensor, biases: Sequence[Tensor] = ()) -> None:
        """down [C, F], its bias [C]."""
        assert len(biases) == (0 if self.down_bias is None else 1), "biases differ from those it was made for"
        with torch.no_grad():
            self.down[expert].copy_(down.T)
            if self.down_bias is not None:
                self.down_bias[expert].copy_(biases[0])

    def forward(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, live: Tensor, shared: Tensor | None = None
    ) -> Tensor:
        """[T, C] -> [T, C]. What a token that is not `live` [T] gets means nothing; it visits expert 0 alone."""
        real = live.unsqueeze(-1)
        if self.identity:
            real = real & (expert_ids < self.num_experts)
            passed = torch.where(expert_ids < self.num_experts, 0.0, weights).sum(1, keepdim=True)
            passed_on = x * passed.to(x.dtype)
            shared = passed_on if shared is None else shared + passed_on
            weights = torch.where(real, weights, 0.0)
        rows, places, sizes, _ = torch.ops.npu.npu_moe_init_routing_v2(
            x,
            torch.where(real, expert_ids, 0),
            active_num=expert_ids.numel(),
            expert_num=self.num_experts,
            expert_tokens_num_type=1,  # sizes, not their sums
            expert_tokens_num_flag=True,
            active_expert_range=[0, self.num_experts],
            row_idx_type=0,  # where each choice went
        )
        both = self._grouped(rows, self.gate_up, self.gate_up_bias, sizes)
        out = self._grouped(activate(both, self.activation), self.down, self.down_bias, sizes)
        return torch.ops.npu.npu_moe_finalize_routing(
            out, shared, None, None, weights.to(out.dtype), places, None, drop_pad_mode=2
        )

    def _grouped(self, x: Tensor, matrices: Tensor, bias: Tensor | None, sizes: Tensor) -> Tensor:
        return torch.ops.npu.npu_grouped_matmul(
            [x],
            [matrices],
            bias=None if bias is None else [bias],
            group_list=sizes,
            split_item=3,
            group_type=0,
            group_list_type=1,
        )[0]


class AscendExpertOps(AscendBase):
    """The protocol `ExpertOps`, see there for what each operator takes and gives."""

    def experts(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        activation: Activation | ClampedSwiglu = "silu",
        *,
        bias: bool = False,
        identity: int = 0,
    ) -> AscendExperts:
        return AscendExperts(num_experts, hidden_size, width, activation, bias, identity, self.dtype, self.device)

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One node; with normalised softmax scores two more. Raises ValueError for what the vendor's gate lacks."""
        softmax, experts = routing.scoring == "softmax", logits.shape[-1]
        if not (softmax or routing.normalize):
            raise ValueError("sigmoid scores that are not normalised; target npu always normalises them")
        if experts > _MOST_EXPERTS or (routing.groups > 1 and experts // routing.groups <= 2):
            raise ValueError(
                f"{experts} experts in {routing.groups} groups; target npu takes {_MOST_EXPERTS} experts at most, in "
                "groups of more than 2"
            )
        # npu_moe_gating_top_k_softmax_v2 would normalise by itself; its converter in torch_npu 2.13.0 cannot be called.
        divide = softmax and routing.normalize
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits,
            routing.top_k,
            bias=bias,
            k_group=routing.top_groups,
            group_count=routing.groups,
            group_select_mode=1,  # a group counts by its best two
            norm_type=0 if softmax else 1,
            routed_scaling_factor=1.0 if divide else routing.scale,
        )
        if divide:
            weights = weights / weights.sum(-1, keepdim=True)
            weights = weights if routing.scale == 1 else weights * routing.scale
        return weights, ids
