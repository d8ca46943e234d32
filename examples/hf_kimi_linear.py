"""A tiny random KimiLinearForCausalLM of transformers on native_kda: a training step and generate.

Its KDA layers have the head dimension of the released model, 128.

usage: python examples/hf_kimi_linear.py [--device cuda] [--against fla|torch] [--json FILE]

The model is unmodified. The same step is done with native_kda and without: by
flash-linear-attention, or by transformers' own torch code (the only choice on the CPU). Exit status
1 if the losses differ by more than 1e-3, or if a layer did not run on native_kda.
"""

import argparse
import json
import os
import shlex
import sys
import time

import torch

import native_kda

native_kda.fla.enable()  # before the model is imported: transformers keeps the functions it finds

from transformers import KimiLinearConfig, KimiLinearForCausalLM  # noqa: E402
from transformers.models.kimi_linear import modeling_kimi_linear as modeling  # noqa: E402

KDA_LAYERS = 3
LIMIT = 1e-3


def make_model(device, dtype):
    torch.manual_seed(0)
    config = KimiLinearConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
        num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32,
        v_head_dim=32, linear_head_dim=128, linear_num_heads=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
        layer_types=["linear_attention"] * KDA_LAYERS + ["full_attention"])
    return KimiLinearForCausalLM(config).to(device, dtype)


def step(model, tokens):
    """Loss of one step and the norm of its gradient."""
    model.train()
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    squares = sum(p.grad.float().square().sum() for p in model.parameters() if p.grad is not None)
    return loss.item(), squares.sqrt().item()


def generate(model, tokens):
    model.eval()
    with torch.no_grad():
        return model.generate(tokens[:, :70], max_new_tokens=16, min_new_tokens=16, do_sample=False)


def without_native_kda(against, run):
    """Runs with what the model would use otherwise."""
    native_kda.fla.disable()
    functions = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
    before = {name: getattr(modeling, name) for name in functions}
    if against == "torch":
        for name, function in before.items():
            setattr(modeling, name, function.__wrapped__)
    try:
        return run()
    finally:
        for name, function in before.items():
            setattr(modeling, name, function)
        native_kda.fla.enable()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--against", choices=("fla", "torch"))
    parser.add_argument("--json")
    given = parser.parse_args()
    against = given.against or ("fla" if given.device == "cuda" else "torch")
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    model = make_model(given.device, dtype)
    tokens = torch.randint(2, 256, (2, 200), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(given.device)

    loss, gradient = step(model, tokens)
    training = native_kda.fla.hits()
    text = generate(model, tokens)
    decoding = native_kda.fla.hits()["fused_recurrent_kda_fwd"]
    other_loss, other_gradient = without_native_kda(against, lambda: step(model, tokens))
    other_text = without_native_kda(against, lambda: generate(model, tokens))

    report = {
        "command": "python " + shlex.join(sys.argv),
        "machine": torch.cuda.get_device_name(0) if given.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
        "native_kda": native_kda.__version__,
        "fla": __import__("fla").__version__,
        "fla's configurations": os.environ.get("FLA_CACHE_MODE", "autotuned"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "dtype": str(dtype), "without": against,
        "loss": loss, "loss without": other_loss,
        "gradient norm": gradient, "gradient norm without": other_gradient,
        "calls of chunk_kda in the step": training["chunk_kda"],
        "calls of fused_recurrent_kda in generate": decoding,
        "tokens generated alike": (text == other_text).float().mean().item(),
        "implementations": native_kda.hits(),
    }
    print(json.dumps(report, indent=1))
    if given.json:
        with open(given.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    reached = training["chunk_kda"] == KDA_LAYERS and decoding > 0
    return 0 if abs(loss - other_loss) <= LIMIT and reached else 1


if __name__ == "__main__":
    sys.exit(main())
