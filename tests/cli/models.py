"""What config.json says of known models, less what has nothing to do with KV."""

from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
QWEN3_14B: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA2_9B: dict[str, Any] = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "hidden_size": 3584,
    "sliding_window": 4096,
    "torch_dtype": "float32",
}
GEMMA3_27B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "vision_config": {"num_hidden_layers": 27},
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
LOPSIDED: dict[str, Any] = {
    **GPT_OSS_20B,
    "num_hidden_layers": 25,
    "layer_types": ["full_attention", *GPT_OSS_20B["layer_types"]],
}
"""13 layers of one kind and 12 of the other: vLLM pads rather than splits."""
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}

KNOWN = {
    "llama": LLAMA_8B,
    "qwen3": QWEN3_14B,
    "qwen2": QWEN2_7B,
    "mistral": MISTRAL_7B,
    "gemma2": GEMMA2_9B,
    "gemma3": GEMMA3_27B,
    "gpt_oss": GPT_OSS_20B,
    "lopsided": LOPSIDED,
    "deepseek": DEEPSEEK_V3,
}
