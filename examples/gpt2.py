"""A small Hugging Face GPT-2 with random weights learns the characters of this project's README.

python examples/gpt2.py      (needs: pip install transformers)
"""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = ak.recommended_dtype(device)
torch.manual_seed(0)
CONTEXT, BATCH = 64, 16

text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
characters = sorted(set(text))
codes = torch.tensor([characters.index(character) for character in text], device=device)


def batch():
    starts = torch.randint(len(codes) - CONTEXT, (BATCH, 1), device=device)
    return codes[starts + torch.arange(CONTEXT, device=device)]


config = GPT2Config(
    vocab_size=len(characters), n_positions=CONTEXT, n_embd=96, n_layer=2, n_head=4, loss_type="ForCausalLM"
)
model = GPT2LMHeadModel(config).to(device)
ak.convert(model)  # converts GPT-2's Conv1D, the norms, and the last layer, which is tied to the embedding
converted = sum(type(module).__module__.startswith("amp_kernels") for module in model.modules())
print(f"{len(text)} characters, {model.num_parameters()} weights, {converted} modules converted")

optimizer = ak.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
scaler = ak.GradScaler(device, enabled=dtype == torch.float16)
losses = []
for step in range(100):
    ids = batch()
    optimizer.zero_grad()
    with torch.autocast(device, dtype):
        loss = model(ids, labels=ids).loss  # GPT-2 shifts the labels
    scaler.scale(loss).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    losses.append(loss.detach())
    if step % 25 == 24:
        print(f"step {step + 1}: loss {loss:.3f}")
print(f"loss {losses[0]:.3f} -> {torch.stack(losses[-5:]).mean():.3f}")
