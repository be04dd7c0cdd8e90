"""LoRA over a frozen base in 4 bits: peft's adapters, bitsandbytes' weights, and this package's loss and optimizer for the adapters.

python examples/lora_peft.py      (needs: pip install peft bitsandbytes transformers)
"""

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def in_4_bits(model):
    """Of a checkpoint, from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True)) does this."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            layer = bnb.nn.Linear4bit(module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16)
            layer.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, layer)
    return model.to(device)


sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
base = in_4_bits(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).bfloat16())
model = get_peft_model(
    base, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
)
model = ak.convert(model, fuse_loss=True)  # 4-bit layers stay as they are
adapters = [param for param in model.parameters() if param.requires_grad]
optimizer = ak.optim.AdamW(adapters, lr=2e-2, max_grad_norm=1.0)
frozen = {name: param.detach().clone() for name, param in model.named_parameters() if param.dtype == torch.uint8}
assert len(frozen) == 7

tokens = torch.arange(16 * 33, device=device).reshape(16, 33) * 5 % 32
losses = []
for _ in range(60):
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
held, kept = (sum(tensor.nbytes for tensor in tensors) for tensors in (adapters, frozen.values()))
same = all(torch.equal(param, frozen[name]) for name, param in model.named_parameters() if name in frozen)
print(f"{held:,} bytes of adapters train; {kept:,} bytes of 4-bit weights stay as they are: {same}")
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
