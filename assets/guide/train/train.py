"""Trains guide, from nothing or from the last checkpoint: `python train.py FOLDER MINUTES [--adamw]`.

The folder keeps `guide.pt` (weights, optimizers, tokens seen, next chunk, hash of the data) and `log.jsonl`.
`schedule.json` beside this file says what each stretch of tokens is made of; it is read again for every chunk, and
every change of it is logged, so that a run can be steered and repeated.

`python train.py FOLDER MINUTES --tune guide.gguf` begins with the rounded weights of the shipped file instead of none, with
optimizers anew, and follows `tune.json`: its shares, its facts that are drawn more often, and its rate, which rises over
`WARM_STEPS` steps and falls linearly over its `tokens`. One worker, since tuning runs beside other work."""

import hashlib
import json
import random
import signal
import sys
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from data import KINDS, Data
from evaluate import score, sets
from export import read
from hints import partial
from model import Guide
from optim import Muon

HERE = Path(__file__).parent
SEED = 20261122
CHUNK, TUNE_CHUNK = 65536, 16384
BATCH = 2048
"""Tokens of a batch, padding included; a step takes one batch per worker."""
WORKERS = 2
"""Threads that each work at a batch of their own: beside other programs, operators that wait for one another's halves
lose half of the speed."""
SAVE_EVERY = 600
SCORE_EVERY = 780
VALID_EVERY = 16
VALID = 2000
"""Tokens of each kind for validation, and the chunks between two looks at them."""
SAMPLE = 30
"""Items of each set that are scored on the way."""
MATRIX_RATE, OTHER_RATE = 0.012, 3e-3
"""Rates of Muon for the matrices between embeddings, and of AdamW for the rest."""
ADAMW_RATE = 2e-3
"""Rate where AdamW takes all (`--adamw`, for comparison)."""
WARM_STEPS = 60
KEPT = ("tokens", "begun", "steps", "chunk", "seconds", "hash")
"""Of a run's state, in its checkpoint; `begun` is the number of tokens that tuned weights had seen before."""


def stage(schedule, tokens):
    """The shares of kinds at a number of tokens, and the factor of the learning rate: linear over each stage."""
    start, rate = 0, 1.0
    for part in schedule:
        if tokens < part["until"]:
            share = (tokens - start) / (part["until"] - start)
            return part["shares"], rate + (part["rate"] - rate) * share
        start, rate = part["until"], part["rate"]
    return schedule[-1]["shares"], rate


def batches(documents, r):
    """Documents of like length together, `BATCH` tokens at a time, in random order."""
    documents = sorted(documents, key=lambda d: len(d[1]))
    found, batch = [], []
    for document in documents:
        if batch and (len(batch) + 1) * len(document[1]) > BATCH:
            found.append(batch)
            batch = []
        batch.append(document)
    found.append(batch)
    r.shuffle(found)
    return found


def tensors(batch):
    length = max(len(tokens) for _, tokens, _ in batch)
    x, y = np.zeros((len(batch), length), np.int64), np.full((len(batch), length), -100, np.int64)
    for row, (_, tokens, written) in enumerate(batch):
        x[row, : len(tokens)] = tokens
        y[row, : len(tokens) - 1] = np.where(written[1:], tokens[1:], -100)
    return torch.from_numpy(x), torch.from_numpy(y)


class Run:
    """The state of a training run, on disk and in memory."""

    def __init__(self, folder, is_adamw, tuned=None):
        self.folder = folder
        self.workers = 1 if tuned else WORKERS
        torch.manual_seed(SEED)
        self.model = Guide()
        matrices = [p for p in self.model.blocks.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if all(p is not m for m in matrices)]
        self.pool = ThreadPoolExecutor(self.workers, initializer=lambda: torch.set_num_threads(1))
        # The workers' models share the weights and have gradients of their own.
        self.replicas = [self.model] + [Guide() for _ in range(self.workers - 1)]
        for replica in self.replicas[1:]:
            for mine, shared in zip(replica.parameters(), self.model.parameters()):
                mine.data = shared.data
        adamw = lambda params, rate, decay: torch.optim.AdamW(params, rate, betas=(0.9, 0.95), weight_decay=decay, fused=True)
        if is_adamw:
            self.optimizers, self.rates = [adamw(matrices, ADAMW_RATE, 0.05), adamw(others, ADAMW_RATE, 0.0)], [ADAMW_RATE] * 2
        else:
            self.optimizers, self.rates = [Muon(matrices, MATRIX_RATE, self.pool), adamw(others, OTHER_RATE, 0.0)], [MATRIX_RATE, OTHER_RATE]
        self.tokens = self.steps = self.chunk = self.begun = 0
        self.seconds, self.hash = 0.0, ""
        if (path := folder / "guide.pt").exists():
            saved = torch.load(path, map_location="cpu")
            self.model.load_state_dict(saved["weights"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"]):
                optimizer.load_state_dict(state)
            for name in KEPT:
                setattr(self, name, saved[name])
        elif tuned:
            weights, _, self.tokens = read(tuned)
            self.begun = self.tokens
            self.model.load_state_dict(weights)
            self.log(tuned_from=self.tokens)

    def save(self):
        state = {name: getattr(self, name) for name in KEPT}
        state |= {"config": self.model.config.as_dict(), "weights": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        torch.save(state, self.folder / "guide.new")
        (self.folder / "guide.new").replace(self.folder / "guide.pt")

    def log(self, **entry):
        entry = {"tokens": self.tokens, "steps": self.steps, "seconds": round(self.seconds), **entry}
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(json.dumps(entry), flush=True)

    def gradients(self, replica, batch, count):
        """Adds a batch's part of a step to a replica's gradients; returns its summed loss."""
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16):
            total = replica(x, y)
        (total / count).backward()
        return total.item()

    def step(self, batches, factor):
        """One update on a batch per worker; returns the loss per target."""
        inputs = [tensors(batch) for batch in batches]
        count = sum(int((y >= 0).sum()) for _, y in inputs)
        total = sum(self.pool.map(self.gradients, self.replicas, inputs, [count] * len(inputs)))
        for replica in self.replicas[1 : len(inputs)]:
            for mine, shared in zip(replica.parameters(), self.model.parameters()):
                shared.grad.add_(mine.grad)
                mine.grad = None
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.steps += 1
        for optimizer, rate in zip(self.optimizers, self.rates):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor * min(1.0, self.steps / WARM_STEPS)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.tokens += sum(len(tokens) for batch in batches for _, tokens, _ in batch)
        return total / count

    def valid(self, by_kind):
        """Loss per kind on documents that are never trained on."""
        losses = {}
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for kind, documents in by_kind.items():
                x, y = tensors(documents)
                losses[kind] = round(self.model(x, y).item() / int((y >= 0).sum()), 4)
        return losses

    def scores(self, data, every):
        self.model.eval()
        right = {}
        for name, items in every.items():
            shares, _ = score(self.model, data.codec, random.Random(1).sample(items, min(SAMPLE, len(items))))
            right[name] = [round(shares.get("right", 0)), round(shares.get("abstained", 0))]
        self.model.train()
        return right


    def learn(self, documents, factor_of):
        """Trains on a chunk, at the rate of each number of tokens; logs its loss and pace."""
        ids = array("H", (t for _, tokens, _ in documents for t in tokens))
        self.hash = hashlib.sha256(self.hash.encode() + ids.tobytes()).hexdigest()
        todo = batches(documents, random.Random(self.chunk))
        losses, began = [], time.time()
        for first in range(0, len(todo), self.workers):
            factor = factor_of(self.tokens)
            losses.append(self.step(todo[first : first + self.workers], factor))
        taken = time.time() - began
        self.chunk += 1
        self.seconds += taken
        self.log(loss=round(sum(losses) / len(losses), 4), rate=round(factor, 3), pace=round(len(ids) / taken))


def main():
    folder, minutes = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    tuned = Path(sys.argv[sys.argv.index("--tune") + 1]) if "--tune" in sys.argv else None
    run, data = Run(folder, "--adamw" in sys.argv, tuned), Data()
    tune = json.loads((HERE / "tune.json").read_text()) if tuned else None
    if tune:
        data.facts.draw_often(tune["often"], tune["times"])
    data.facts.partial = partial(data)
    every, shares_before = sets(data), None
    valid = {kind: data.chunk("valid", 0, {kind: 1.0}, VALID, data.plain) for kind in KINDS}
    # A run that is told to end keeps what it has learnt.
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    began = saved_at = scored_at = time.time()
    while time.time() - began < 60 * minutes and not ending:
        if tune:
            shares, factor_of = tune["shares"], lambda tokens: tune["rate"] * max(0.02, 1 - (tokens - run.begun) / tune["tokens"])
            if run.tokens >= run.begun + tune["tokens"]:
                break
        else:
            schedule = json.loads((HERE / "schedule.json").read_text())
            if run.tokens >= schedule[-1]["until"]:
                break
            shares, factor_of = stage(schedule, run.tokens)[0], lambda tokens: stage(schedule, tokens)[1]
        if shares != shares_before:
            run.log(shares=shares)
            shares_before = shares
        if run.chunk % VALID_EVERY == 0:
            run.log(valid=run.valid(valid))
        run.learn(data.chunk(f"tune{SEED}" if tune else SEED, run.chunk, shares, TUNE_CHUNK if tune else CHUNK), factor_of)
        if not tune and time.time() - scored_at > SCORE_EVERY:
            run.log(scores=run.scores(data, every))
            scored_at = time.time()
        if time.time() - saved_at > SAVE_EVERY:
            run.save()
            saved_at = time.time()
    run.save()
    if not ending and not tune:
        run.log(scores=run.scores(data, every), hash=run.hash)


if __name__ == "__main__":
    main()
