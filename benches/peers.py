"""Other engines on the same GGUF file, each in a process of its own, for `side_by_side.py --peers`.

A worker answers the commands of examples/throughput.rs (`prefill N`, `decode N D`, `batch N B`, `memory`) with a line of JSON each:
{"rate": tokens per second}, or {"absent": reason} where the engine cannot be asked. Its first line has `ready_s`, the time from the
start of loading to the first token of a short prompt, or `absent` if it does not read the file. No prompt comes twice.

llama.cpp: llama-cpp-python built for this machine, by flash attention off and on.
ik_llama.cpp: a llama-bench that was built elsewhere, with run-time repacking off and on; each answer is a process, which loads the file.
Sequences together are answered by the llama-batched-bench beside it, if there is one.
openvino: OpenVINO GenAI (PyPI), where its GGUF reader takes the file.
mistral.rs: mistralrs (PyPI); its rates are those of its own usage reports, and a batch cannot be told from its queue.
"""
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH_PROMPT = 128
CONTEXT_SLACK = 1024

# Options of each peer, of which the better one counts.
OPTIONS = {
    "llama.cpp": ("fa off", "fa on"),
    "ik_llama.cpp": ("as it is", "repacked"),
    "openvino": ("",),
    "mistral.rs": ("",),
}


def peak_rss_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM:"))


class LlamaCpp:
    """The commands of examples/throughput.rs, for one setting of flash attention."""

    def __init__(self, path, threads, context, flash):
        import llama_cpp

        self.lib, self.threads, self.flash, self.context = llama_cpp, threads, flash, context
        self.silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.before = peak_rss_mib()
        start = time.perf_counter()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp does not load {path}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.random = random.Random(flash)
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self.single, self.many, self.deep = self.new_context(context, 1), {}, {}
        self.feed(self.single, 8)
        self.ready = time.perf_counter() - start

    def new_context(self, size, sequences):
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = size * sequences, 2048, 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = self.flash
        if hasattr(params, "kv_unified"):
            params.kv_unified = False
        return self.lib.llama_init_from_model(self.model, params)

    def decode(self, context, rows):
        """Rows of (position, sequence) with random tokens; logits of the last row of every sequence."""
        last = {sequence: index for index, (_, sequence) in enumerate(rows)}
        batch = self.batch
        for index, (position, sequence) in enumerate(rows):
            batch.token[index] = self.random.randrange(self.vocab)
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = last[sequence] == index
        batch.n_tokens = len(rows)
        code = self.lib.llama_decode(context, batch)
        if code:
            sys.exit(f"llama_decode returned {code}")
        self.lib.llama_synchronize(context)

    def feed(self, context, count, sequence=0):
        for start in range(0, count, 2048):
            self.decode(context, [(at, sequence) for at in range(start, min(count, start + 2048))])

    def clear(self, context):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), True)

    def steps(self, context, count, first, sequences=1):
        start = time.perf_counter()
        for step in range(count):
            self.decode(context, [(first + step, sequence) for sequence in range(sequences)])
        return sequences * count / (time.perf_counter() - start)

    def run(self, name, numbers):
        if name == "prefill":
            self.clear(self.single)
            start = time.perf_counter()
            self.feed(self.single, numbers[0])
            return {"rate": numbers[0] / (time.perf_counter() - start)}
        if name == "decode":
            count, depth = numbers
            if depth not in self.deep:
                context = self.new_context(max(depth + CONTEXT_SLACK, 2048), 1)
                self.feed(context, max(depth, 1))
                self.deep[depth] = [context, max(depth, 1)]
            context, position = self.deep[depth]
            self.deep[depth][1] += count
            return {"rate": self.steps(context, count, position)}
        count, sequences = numbers
        if sequences not in self.many:
            self.many[sequences] = self.new_context(512, sequences)
        many = self.many[sequences]
        self.clear(many)
        for sequence in range(sequences):
            self.feed(many, BATCH_PROMPT, sequence)
        return {"rate": self.steps(many, count, BATCH_PROMPT, sequences)}


class IkLlama:
    """llama-bench of ik_llama.cpp, which is started for each answer."""

    def __init__(self, program, path, threads, repacks):
        program, path = os.path.abspath(program), os.path.abspath(path)
        self.command = [program, "-m", path, "-t", str(threads), "-r", "1", "-fa", "1", "-o", "json"]
        self.command += ["-rtr", "1"] if repacks else []
        self.batched = [str(Path(program).with_name("llama-batched-bench")), "-m", path, "-t", str(threads), "-fa", "1", "-ub", "512"]
        self.batched += ["-rtr"] if repacks else []
        self.bench("-p", "8", "-n", "0")
        self.ready = None  # it warms up before it measures

    def done(self, command):
        with tempfile.TemporaryDirectory() as folder:  # for its log
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}")
        return done

    def bench(self, *args):
        return [row["avg_ts"] for row in json.loads(self.done([*self.command, *args]).stdout)][-1]

    def together(self, count, sequences):
        """Tokens per second of `sequences` answers of `count` tokens: the column S_TG of the last row, which is on stderr."""
        sizes = ("-c", 512 * sequences, "-npp", BATCH_PROMPT, "-ntg", count, "-npl", sequences)
        lines = self.done([*self.batched, *map(str, sizes)]).stderr.splitlines()
        return float([line.split("|") for line in lines if line.startswith("|")][-1][8])

    def run(self, name, numbers):
        if name == "prefill":
            return {"rate": self.bench("-p", str(numbers[0]), "-n", "0")}
        if name == "decode":
            count, depth = numbers
            args = ("-p", "0", "-n", str(count)) if depth <= 1 else ("-p", "0", "-n", "0", "-gp", f"{depth},{count}")
            return {"rate": self.bench(*args)}
        if not os.path.exists(self.batched[0]):
            return {"absent": "llama-bench has one sequence"}
        return {"rate": self.together(*numbers)}


class OpenVino:
    def __init__(self, path, threads):
        import openvino
        import openvino_genai

        self.openvino, self.genai = openvino, openvino_genai
        self.before = peak_rss_mib()
        start = time.perf_counter()
        self.pipe = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
        self.answer(8, 1)
        self.ready = time.perf_counter() - start

    def answer(self, length, count, sequences=1):
        """Seconds of an answer of `count` tokens to prompts of random ids, and the engine's own metrics."""
        import numpy as np

        ids = np.array([[random.randrange(100, 250) for _ in range(length)] for _ in range(sequences)], np.int64)
        tensors = (self.openvino.Tensor(ids), self.openvino.Tensor(np.ones_like(ids)))
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        start = time.perf_counter()
        result = self.pipe.generate(self.genai.TokenizedInputs(*tensors), config)
        return time.perf_counter() - start, result.perf_metrics

    def run(self, name, numbers):
        if name == "prefill":
            _, metrics = self.answer(numbers[0], 1)
            return {"rate": 1e3 * numbers[0] / metrics.get_ttft().mean}
        if name == "decode":
            count, depth = numbers
            _, metrics = self.answer(max(depth, 1), count + 1)
            return {"rate": 1e3 / metrics.get_tpot().mean}
        count, sequences = numbers
        first, _ = self.answer(BATCH_PROMPT, 1, sequences)
        whole, _ = self.answer(BATCH_PROMPT, count + 1, sequences)
        return {"rate": count * sequences / (whole - first)}


class MistralRs:
    def __init__(self, path, threads):
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        import mistralrs

        self.mistralrs = mistralrs
        self.before = peak_rss_mib()
        folder, name = os.path.split(path)
        start = time.perf_counter()
        which = mistralrs.Which.GGUF(quantized_model_id=folder, quantized_filename=name)
        self.runner = mistralrs.Runner(which=which, max_seqs=32, prefix_cache_n=0)
        self.answer(8, 1)
        self.ready = time.perf_counter() - start

    def answer(self, length, count):
        prompt = "".join(random.choice("abcdefgijklmnopqrsuvwxyz ") for _ in range(length))  # without "th", one token each or fewer
        request = self.mistralrs.CompletionRequest(model="default", prompt=prompt, max_tokens=count, temperature=0.0)
        return self.runner.send_completion_request(request).usage

    def run(self, name, numbers):
        if name == "prefill":
            return {"rate": self.answer(numbers[0], 1).avg_prompt_tok_per_sec}
        if name == "decode":
            count, depth = numbers
            return {"rate": self.answer(max(depth, 1), count).avg_compl_tok_per_sec}
        return {"absent": "its Python interface answers one request at a time"}


def created(peer, option, program, path, threads, context):
    if peer == "llama.cpp":
        return LlamaCpp(path, threads, context, OPTIONS[peer].index(option))
    if peer == "ik_llama.cpp":
        return IkLlama(program, path, threads, option == "repacked")
    return {"openvino": OpenVino, "mistral.rs": MistralRs}[peer](path, threads)


def worker(peer, option, program, path, threads, context):
    """Answers the commands on stdin. What an engine writes to stdout by itself goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tell = lambda answer: print(json.dumps(answer), file=answers, flush=True)
    try:
        side = created(peer, option, program, path, int(threads), int(context))
    except Exception as error:  # whatever a library raises for a file that it does not read
        return tell({"absent": f"{type(error).__name__}: {error}"[:300]})
    tell({"ready_s": side.ready, "version": version(peer)})
    for line in sys.stdin:
        name, *numbers = line.split()
        if name == "memory":
            tell({"peak_rss_mib": peak_rss_mib() - side.before} if hasattr(side, "before") else {"absent": "another process has it"})
            continue
        try:
            tell(side.run(name, [int(number) for number in numbers]))
        except Exception as error:
            tell({"absent": f"{type(error).__name__}: {error}"[:300]})


def version(peer):
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    package = {"llama.cpp": "llama-cpp-python", "openvino": "openvino-genai", "mistral.rs": "mistralrs"}.get(peer)
    try:
        return installed(package) if package else None
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    worker(*sys.argv[1:])
