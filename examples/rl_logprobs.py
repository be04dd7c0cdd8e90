"""FP16 training with the bits of the rollout: ratios of probabilities are 1, and micro-batches give the gradient of one batch.

python examples/rl_logprobs.py
"""

import torch

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
WORDS, TOKENS = 16, 256
head = ak.nn.Linear(32, WORDS)
policy = torch.nn.Sequential(ak.nn.Embedding(WORDS, 32), ak.nn.RMSNorm(32), ak.nn.MLP(32, 64), head).to(device)
optimizer = ak.optim.AdamW(policy.parameters(), lr=1e-2)
scaler = ak.GradScaler(device, init_scale=2.0**10)
ak.nn.accumulate_fp32(policy)


def log_probs(words, actions):
    with torch.autocast(device, dtype=torch.float16), ak.batch_invariant():
        return ak.linear_log_probs(policy[:3](words), head.weight, actions, linear_bias=head.bias)


@torch.no_grad()
def rollout(words):
    """An action for each word, and their log-probabilities, of 5 requests at a time."""
    with torch.autocast(device, dtype=torch.float16):
        actions = torch.distributions.Categorical(logits=policy(words).float()).sample()
    return actions, torch.cat([log_probs(*few) for few in zip(words.split(5), actions.split(5), strict=True)])


def accumulate(words, actions, sampled, advantage, rows):
    """The gradient of the clipped objective, from micro-batches of ``rows`` tokens; the largest distance of a ratio from 1."""
    optimizer.zero_grad()
    off = 0.0
    for x, y, old, gain in zip(*(t.split(rows) for t in (words, actions, sampled, advantage)), strict=True):
        ratio = (log_probs(x, y) - old).exp()
        scaler.scale(-torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).sum() / TOKENS).backward()
        off = max(off, (ratio - 1).abs().max().item())
    return off, [param.grad.clone() for param in policy.parameters()]


losses = []
for update in range(40):
    words = torch.randint(WORDS, (TOKENS,), device=device)
    actions, sampled = rollout(words)
    reward = (actions == (words + 1) % WORDS).float()
    batch = words, actions, sampled, reward - reward.mean()
    off, gradients = accumulate(*batch, rows=64)
    if update == 0:
        same = all(map(torch.equal, gradients, accumulate(*batch, rows=TOKENS)[1]))
        print(f"largest distance of a ratio from 1: {off}; micro-batches give the gradient of one batch: {same}")
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    losses.append(1 - reward.mean().item())
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
