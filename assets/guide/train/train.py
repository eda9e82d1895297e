"""Trains guide, from nothing or from the last checkpoint: `python train.py FOLDER MINUTES`.

The folder keeps `guide.pt` (weights, optimizers, tokens seen, next chunk, hash of the data) and `log.jsonl`.
`schedule.json` beside this file says what each stretch of tokens is made of; it is read again for every chunk, and
every change of it is logged, so that a run can be steered and repeated."""

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

from data import Data
from evaluate import score, sets
from model import Guide
from optim import Muon

HERE = Path(__file__).parent
SEED = 20261122
CHUNK = 65536
BATCH = 2048
"""Tokens of a batch, padding included; a step takes one batch per worker."""
WORKERS = 2
"""Threads that each work at a batch of their own: beside other programs, operators that wait for one another's halves
lose half of the speed."""
SAVE_EVERY = 600
SCORE_EVERY = 780
SAMPLE = 30
"""Items of each set that are scored on the way."""
MATRIX_RATE, OTHER_RATE = 0.012, 3e-3
WARM_STEPS = 60


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

    def __init__(self, folder):
        self.folder = folder
        torch.manual_seed(SEED)
        self.model = Guide()
        matrices = [p for p in self.model.blocks.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if all(p is not m for m in matrices)]
        self.pool = ThreadPoolExecutor(WORKERS, initializer=lambda: torch.set_num_threads(1))
        # The workers' models share the weights and have gradients of their own.
        self.replicas = [self.model] + [Guide() for _ in range(WORKERS - 1)]
        for replica in self.replicas[1:]:
            for mine, shared in zip(replica.parameters(), self.model.parameters()):
                mine.data = shared.data
        self.optimizers = [Muon(matrices, MATRIX_RATE, self.pool), torch.optim.AdamW(others, OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
        self.rates = [MATRIX_RATE, OTHER_RATE]
        self.tokens = self.steps = self.chunk = 0
        self.seconds, self.hash = 0.0, ""
        if (path := folder / "guide.pt").exists():
            saved = torch.load(path, map_location="cpu")
            self.model.load_state_dict(saved["weights"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"]):
                optimizer.load_state_dict(state)
            for name in ("tokens", "steps", "chunk", "seconds", "hash"):
                setattr(self, name, saved[name])

    def save(self):
        state = {name: getattr(self, name) for name in ("tokens", "steps", "chunk", "seconds", "hash")}
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

    def kinds(self, batches):
        """Loss per kind on fresh documents, before they are trained on."""
        sums = {}
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            by_kind = {}
            for document in (d for b in batches for d in b):
                by_kind.setdefault(document[0], []).append(document)
            for kind, documents in by_kind.items():
                x, y = tensors(documents[:8])
                sums[kind] = round(self.model(x, y).item() / int((y >= 0).sum()), 4)
        return sums

    def scores(self, data, every):
        self.model.eval()
        right = {}
        for name, items in every.items():
            shares, _ = score(self.model, data.codec, random.Random(1).sample(items, min(SAMPLE, len(items))))
            right[name] = [round(shares.get("right", 0)), round(shares.get("abstained", 0))]
        self.model.train()
        return right


def main():
    folder, minutes = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    run, data = Run(folder), Data()
    every, shares_before = sets(data), None
    began = saved_at = scored_at = time.time()
    seconds_before = run.seconds
    # A run that is told to end keeps what it has learnt.
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    while time.time() - began < 60 * minutes and not ending:
        schedule = json.loads((HERE / "schedule.json").read_text())
        shares, factor = stage(schedule, run.tokens)
        if shares != shares_before:
            run.log(shares=shares)
            shares_before = shares
        drawn = time.time()
        documents = data.chunk(SEED, run.chunk, shares, CHUNK)
        drawing = time.time() - drawn
        ids = array("H", (t for _, tokens, _ in documents for t in tokens))
        run.hash = hashlib.sha256(run.hash.encode() + ids.tobytes()).hexdigest()
        todo = batches(documents, random.Random(run.chunk))
        kinds = run.kinds(todo) if run.chunk % 8 == 0 else None
        losses, at = [], time.time()
        for first in range(0, len(todo), WORKERS):
            _, factor = stage(schedule, run.tokens)
            losses.append(run.step(todo[first : first + WORKERS], factor))
        run.chunk += 1
        run.seconds = seconds_before + time.time() - began
        pace = len(ids) / (time.time() - at)
        run.log(loss=round(sum(losses) / len(losses), 4), rate=round(factor, 3), pace=round(pace), drawing=round(drawing, 1), **({"kinds": kinds} if kinds else {}))
        if time.time() - scored_at > SCORE_EVERY:
            begin = time.time()
            run.log(scores=run.scores(data, every), scoring=round(time.time() - begin))
            scored_at = time.time()
        if time.time() - saved_at > SAVE_EVERY:
            run.save()
            saved_at = time.time()
    run.save()
    if not ending:
        run.log(scores=run.scores(data, every), hash=run.hash)


if __name__ == "__main__":
    main()
