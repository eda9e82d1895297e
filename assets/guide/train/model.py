"""The network: a Qwen3-shaped decoder, small enough to be carried in the binary."""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    """The shape; `context` bounds the positions that the rotary table covers."""

    vocab: int = 4096
    width: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 64
    hidden: int = 704
    context: int = 4096
    theta: float = 10000.0
    epsilon: float = 1e-6

    def as_dict(self):
        return asdict(self)


class Norm(nn.Module):
    """RMS norm with a learnt scale."""

    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.epsilon)


def rotary(config):
    """Cosines and sines of every position, in the half-rotated layout that Qwen3 and llama.cpp call NEOX."""
    half = torch.arange(0, config.head_width, 2).float() / config.head_width
    angles = torch.arange(config.context).float()[:, None] / config.theta**half
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


def attend(q, k, v, mask):
    """Grouped attention as plain products: on two CPU cores, forward and backward take a quarter of the time of
    PyTorch's flash attention at the lengths that training sees. `mask` is added to the scores."""
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    q = (q * width**-0.5).reshape(batch, groups, heads // groups * length, width)
    scores = (q @ k.transpose(2, 3)).view(batch, heads, length, -1) + mask
    shares = scores.softmax(-1).to(v.dtype).view(batch, groups, heads // groups * length, -1)
    return (shares @ v).view(batch, heads, length, width)


def added(allowed):
    """A mask of booleans as numbers to add."""
    return torch.zeros(allowed.shape).masked_fill(~allowed, -1e9)


class Block(nn.Module):
    """Attention with grouped keys and normed queries and keys, then a gated feed-forward."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.attn_norm, self.ffn_norm = Norm(c.width, c.epsilon), Norm(c.width, c.epsilon)
        self.q_norm, self.k_norm = Norm(c.head_width, c.epsilon), Norm(c.head_width, c.epsilon)
        # Separate matrices, because Muon orthogonalises each by itself.
        self.q = nn.Linear(c.width, c.heads * c.head_width, bias=False)
        self.k = nn.Linear(c.width, c.kv_heads * c.head_width, bias=False)
        self.v = nn.Linear(c.width, c.kv_heads * c.head_width, bias=False)
        self.o = nn.Linear(c.heads * c.head_width, c.width, bias=False)
        self.gate = nn.Linear(c.width, c.hidden, bias=False)
        self.up = nn.Linear(c.width, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x, cos, sin, mask, cache=None):
        c = self.config
        batch, length, _ = x.shape
        h = self.attn_norm(x)
        q = self.q_norm(self.q(h).view(batch, length, c.heads, c.head_width)).transpose(1, 2)
        k = self.k_norm(self.k(h).view(batch, length, c.kv_heads, c.head_width)).transpose(1, 2)
        v = self.v(h).view(batch, length, c.kv_heads, c.head_width).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(k, v)
        y = attend(q, k, v, mask)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Cache:
    """Keys and values of one layer, for generation."""

    def __init__(self):
        self.k = self.v = None

    def extend(self, k, v):
        if self.k is not None:
            k, v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.k, self.v = k, v
        return k, v


class Guide(nn.Module):
    """Embeddings (shared with the output), blocks, a last norm."""

    def __init__(self, config=Config()):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.width, config.epsilon)
        cos, sin = rotary(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Residual writers start small, so that depth does not blow up the stream.
                scale = (2 * config.layers) ** -0.5 if name.endswith(("o.weight", "down.weight")) else 1.0
                nn.init.normal_(weight, 0.0, 0.02 * scale)

    def hidden(self, tokens):
        """The last hidden states of whole sequences."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        mask = added(torch.ones(length, length, dtype=torch.bool).tril())
        x = self.embed(tokens)
        if torch.is_autocast_enabled("cpu"):
            # Rotation and scores stay in the narrow type: half of the memory to pass over.
            narrow = torch.get_autocast_dtype("cpu")
            cos, sin, mask = cos.to(narrow), sin.to(narrow), mask.to(narrow)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return self.norm(x)

    def forward(self, tokens, targets):
        """Summed cross entropy over the positions whose target is not negative."""
        h = self.hidden(tokens).flatten(0, 1)
        targets = targets.flatten()
        kept = (targets >= 0).nonzero().squeeze(1)
        logits = F.linear(h[kept], self.embed.weight)
        return F.cross_entropy(logits.float(), targets[kept], reduction="sum")

    def step(self, tokens, positions, mask, caches):
        """Logits behind the last token, for left-padded batches: each row has its own positions."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.embed(tokens)
        for block, cache in zip(self.blocks, caches):
            x = block(x, cos, sin, mask, cache)
        return F.linear(self.norm(x[:, -1]), self.embed.weight)

    @torch.no_grad()
    def generate(self, prompts, most, stops):
        """Greedy answers to prompts of different lengths, as lists of tokens without the stop."""
        width = max(map(len, prompts))
        pad = [width - len(p) for p in prompts]
        tokens = torch.tensor([[0] * n + p for n, p in zip(pad, prompts)])
        pads = torch.tensor(pad)[:, None]
        positions = (torch.arange(width)[None] - pads).clamp(min=0)
        seen = torch.arange(width)[None] >= pads
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        # Padding looks at itself: a row without any key would be NaN.
        mask = (causal[None] & seen[:, None]) | torch.eye(width, dtype=torch.bool)[None]
        caches = [Cache() for _ in self.blocks]
        answers = [[] for _ in prompts]
        open_rows = set(range(len(prompts)))
        logits = self.step(tokens, positions, added(mask[:, None]), caches)
        for _ in range(most):
            best = logits.argmax(-1)
            for row in list(open_rows):
                if int(best[row]) in stops:
                    open_rows.discard(row)
                else:
                    answers[row].append(int(best[row]))
            if not open_rows:
                break
            positions = positions[:, -1:] + 1
            seen = torch.cat([seen, torch.ones(len(prompts), 1, dtype=torch.bool)], 1)
            logits = self.step(best[:, None], positions, added(seen[:, None, None]), caches)
        return answers
