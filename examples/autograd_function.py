"""A custom autograd function on ak.matmul: an MLP with squared ReLU that recomputes hidden activations in backward.

python examples/autograd_function.py
"""

import torch
from torch import nn

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class SquaredReluMLP(torch.autograd.Function):
    """``relu(x @ w1)^2 @ w2`` (So et al., "Primer", NeurIPS 2021); backward recomputes the hidden layer."""

    @staticmethod
    @torch.amp.custom_fwd(device_type=device)
    def forward(ctx, x, w1, w2):
        ctx.save_for_backward(x, w1, w2)
        return ak.matmul(ak.matmul(x, w1).relu().square(), w2)

    @staticmethod
    @torch.amp.custom_bwd(device_type=device)  # uses the autocast state of forward
    def backward(ctx, grad):
        x, w1, w2 = ctx.saved_tensors
        hidden = ak.matmul(x, w1).relu()
        grad_hidden = ak.matmul(grad, w2.T) * hidden * 2
        # out_dtype: the gradient of an FP32 weight is the FP32 sum of the 16-bit GEMM, without rounding
        grad_w1 = ak.matmul(x.T, grad_hidden, out_dtype=w1.dtype)
        grad_w2 = ak.matmul(hidden.square().T, grad, out_dtype=w2.dtype)
        return ak.matmul(grad_hidden, w1.T), grad_w1, grad_w2


doubles = [
    torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (3, 7), (7, 2))
]
print("gradcheck in float64:", torch.autograd.gradcheck(SquaredReluMLP.apply, doubles))

w1 = nn.Parameter(torch.randn(16, 256, device=device) / 4)
w2 = nn.Parameter(torch.randn(256, 4, device=device) / 32)
optimizer = ak.optim.Lion([w1, w2], lr=2e-3)
target = torch.randn(16, 4, device=device) / 4

losses = []
for _ in range(150):
    x = torch.randn(256, 16, device=device)
    optimizer.zero_grad()
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.mse_loss(SquaredReluMLP.apply(x, w1, w2), (x @ target).square())
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
print(f"gradients: {w1.grad.dtype}, {w2.grad.dtype}")
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
