"""Models and clusters as tables of values: small models that run here, the published ones, and real clusters.

Source of the models: configuration files published with each model; sizes as in the papers of Mixtral, DeepSeek, Qwen3,
OLMoE, gpt-oss, Switch Transformer and GShard. Departs: Switch-Base (an encoder-decoder) is built as a decoder of all
its 24 blocks. Batches are what one device trains on in an iteration, micro-batches together; they are ours.
Source of the clusters: vendors' data sheets; Gemini, SOSP'23, for the storage beside p3dn and p4d.
"""

from __future__ import annotations

from typing import Any

_MIXTRAL = {"family": "mixtral"}
_GPT = {"family": "gpt-moe", "moe_every": 2, "tie_embeddings": True}
_FULL = {"seq_len": 4096, "batch_size": 4}

MODELS: dict[str, dict[str, Any]] = {
    "mixtral-tiny": _MIXTRAL | dict(
        num_layers=2, hidden=64, ffn=64, num_heads=4, num_kv_heads=2, head_dim=16,
        num_experts=8, top_k=2, vocab_size=256, seq_len=64, batch_size=2,
    ),
    "mixtral-small": _MIXTRAL | dict(
        num_layers=4, hidden=256, ffn=512, num_heads=8, num_kv_heads=2, head_dim=32,
        num_experts=8, top_k=2, vocab_size=4096, seq_len=256, batch_size=4,
    ),
    "qwen3-moe-tiny": _MIXTRAL | dict(
        num_layers=2, hidden=64, ffn=16, num_heads=4, num_kv_heads=2, head_dim=16,
        num_experts=16, top_k=8, num_shared_experts=1, vocab_size=256, seq_len=64, batch_size=2,
    ),
    "qwen3-moe-small": _MIXTRAL | dict(
        num_layers=4, hidden=256, ffn=64, num_heads=8, num_kv_heads=2, head_dim=32,
        num_experts=64, top_k=8, vocab_size=4096, seq_len=256, batch_size=4,
    ),
    "gpt-moe-tiny": _GPT | dict(
        num_layers=2, hidden=64, ffn=128, num_heads=4, num_kv_heads=4, head_dim=16,
        num_experts=8, top_k=2, vocab_size=256, seq_len=64, batch_size=2,
    ),
    "gpt-moe-small": _GPT | dict(
        num_layers=4, hidden=256, ffn=1024, num_heads=8, num_kv_heads=8, head_dim=32,
        num_experts=8, top_k=2, vocab_size=4096, seq_len=256, batch_size=4,
    ),
    "mixtral-8x7b": _MIXTRAL | _FULL | dict(
        num_layers=32, hidden=4096, ffn=14336, num_heads=32, num_kv_heads=8, head_dim=128,
        num_experts=8, top_k=2, vocab_size=32000,
    ),
    "mixtral-8x22b": _MIXTRAL | _FULL | dict(
        num_layers=56, hidden=6144, ffn=16384, num_heads=48, num_kv_heads=8, head_dim=128,
        num_experts=8, top_k=2, vocab_size=32768,
    ),
    "deepseek-moe-16b": _MIXTRAL | _FULL | dict(
        num_layers=28, hidden=2048, ffn=1408, num_heads=16, num_kv_heads=16, head_dim=128,
        num_experts=64, top_k=6, num_shared_experts=2, num_dense_layers=1, dense_ffn=10944, vocab_size=102400,
    ),
    "deepseek-v3": _MIXTRAL | _FULL | dict(
        num_layers=61, hidden=7168, ffn=2048, num_heads=128, num_kv_heads=128, head_dim=128, attention="mla",
        num_experts=256, top_k=8, num_shared_experts=1, num_dense_layers=3, dense_ffn=18432, vocab_size=129280,
    ),
    "qwen3-30b-a3b": _MIXTRAL | _FULL | dict(
        num_layers=48, hidden=2048, ffn=768, num_heads=32, num_kv_heads=4, head_dim=128,
        num_experts=128, top_k=8, vocab_size=151936,
    ),
    "qwen3-235b-a22b": _MIXTRAL | _FULL | dict(
        num_layers=94, hidden=4096, ffn=1536, num_heads=64, num_kv_heads=4, head_dim=128,
        num_experts=128, top_k=8, vocab_size=151936,
    ),
    "olmoe-1b-7b": _MIXTRAL | _FULL | dict(
        num_layers=16, hidden=2048, ffn=1024, num_heads=16, num_kv_heads=16, head_dim=128,
        num_experts=64, top_k=8, vocab_size=50304,
    ),
    "gpt-oss-20b": _MIXTRAL | _FULL | dict(
        num_layers=24, hidden=2880, ffn=2880, num_heads=64, num_kv_heads=8, head_dim=64,
        num_experts=32, top_k=4, vocab_size=201088,
    ),
    "switch-base-64": _GPT | dict(
        num_layers=24, hidden=768, ffn=3072, num_heads=12, num_kv_heads=12, head_dim=64,
        num_experts=64, top_k=2, vocab_size=32128, seq_len=512, batch_size=32,
    ),
    "gpt-350m-16e": _GPT | dict(
        num_layers=24, hidden=1024, ffn=4096, num_heads=16, num_kv_heads=16, head_dim=64,
        num_experts=16, top_k=2, vocab_size=51200, seq_len=2048, batch_size=8,
    ),
}  # fmt: skip

CLUSTERS: dict[str, dict[str, Any]] = {
    "p3dn": dict(accelerator="v100", devices_per_node=8, link_bytes_per_s="100Gbit", storage="shared-20g"),
    "3090-100g": dict(accelerator="rtx3090", devices_per_node=4, link_bytes_per_s="100Gbit", storage="nvme-gen3"),
    "p4d": dict(accelerator="a100", devices_per_node=8, link_bytes_per_s="400Gbit", storage="shared-20g"),
    "dgx-a100": dict(accelerator="a100", devices_per_node=8, link_bytes_per_s="1600Gbit", storage="nvme-gen4-x4"),
    "dgx-h100": dict(accelerator="h100", devices_per_node=8, link_bytes_per_s="3200Gbit", storage="nvme-gen4-x4"),
}
