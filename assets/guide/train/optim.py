"""Muon: momentum whose direction is made orthogonal, for the matrices between embeddings; AdamW takes the rest."""

import torch


def orthogonal(batch):
    """Newton-Schulz towards the nearest orthogonal matrices; the coefficients trade exactness for few rounds."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = batch.bfloat16()
    if is_tall := x.shape[1] > x.shape[2]:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return (x.transpose(1, 2) if is_tall else x).to(batch.dtype)


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are orthogonalised in one batch, shapes side by side on the pool's threads."""

    def __init__(self, params, lr, pool, momentum=0.95, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.pool = pool

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            list(self.pool.map(lambda params: self.update(group, params), shapes.values()))

    @torch.no_grad()
    def update(self, group, params):
        directions = []
        for p in params:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].lerp_(p.grad, 1 - group["momentum"])
            directions.append(p.grad.lerp(state["momentum"], group["momentum"]))
        rows, columns = params[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for p, direction in zip(params, orthogonal(torch.stack(directions))):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(direction, alpha=-group["lr"] * scale)
