#!/usr/bin/env python3
"""Images in llmctl and in llama.cpp's mtmd: the same synthetic model and mmproj file, interleaved in one run.

  python benches/images.py [--shapes NAMES] [--types F16,Q8_0] [-r N] [--program LLMCTL]

Needs numpy, gguf and pillow, and llama-cpp-python with mtmd built for this machine (all from PyPI). Shapes are published ones, weights are
random: time does not depend on the values. Both sides stay loaded and take turns; no image comes twice.

image: from a PNG to the first token: decoding, resizing, the tower, the rows of the image in the model. llmctl answers over HTTP (base64 and
JSON included), mtmd is called in its own process, the faster of its runs with and without flash attention. second turn: another question about
the image of the last answer, llmctl alone, because mtmd has no cache of its own. gap: milliseconds between two tokens of another answer while
the image is encoded, as median and 99th percentile, beside those while a text prompt of as many tokens is computed.
"""
import argparse
import base64
import ctypes
import io
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import side_by_side as bench

# `text` of side_by_side's form; `tower`: layers, width, inner width, heads, patch and patches joined to a side of a token.
SHAPES = {
    "qwen3-vl-2b": dict(
        text=dict(arch="qwen3vl", layers=28, hidden=2048, heads=16, kv=8, head=128, ffn=6144, vocab=151936),
        tower=dict(kind="qwen3vl_merger", layers=24, hidden=1024, ffn=4096, heads=16, patch=16, merge=2, deepstack=(5, 11, 17)),
        images=((896, 896), (1920, 1080)),
    ),
    "gemma-4-e2b": dict(
        text=bench.OTHER_SHAPES["gemma-4-e2b"],
        tower=dict(kind="gemma4v", layers=16, hidden=768, ffn=3072, heads=12, patch=16, merge=3),
        images=((768, 768), (896, 896)),
    ),
}
SPECIALS = {
    "qwen3vl_merger": ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
    "gemma4v": ["<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>"],
}
IMAGE_TEXT = {"qwen3vl_merger": "<|vision_start|><|image_pad|><|vision_end|>", "gemma4v": "<|image|>"}
QUESTION, SECOND = "What is this?", "And what else?"


def template(kind):
    start, end = SPECIALS[kind][:2]
    part = f"{{% if part.type == 'image' %}}{IMAGE_TEXT[kind]}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    content = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{{% for part in m.content %}}{part}{{% endfor %}}{{% endif %}}"
    return f"{{% for m in messages %}}{start}{{{{ m.role }}}}\n{content}{end}\n{{% endfor %}}{start}assistant\n"


def write_text(path, shape, kind):
    """The text model of `shape` in Q4_K_M, with the special tokens of images behind those of side_by_side."""
    import gguf

    text, specials = shape["text"], SPECIALS[kind]
    plain = bench.write_vocabulary

    def vocabulary(writer, size):
        plain(writer, size)
        tokens, kinds = (writer.kv_data[0][key] for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"))
        kinds.value[:] = [1 if value == 5 else value for value in kinds.value]
        for index, token in enumerate(specials):
            tokens.value[300 + index], kinds.value[300 + index] = token, 3
        writer.add_chat_template(template(kind))
        if kind == "qwen3vl_merger":
            writer.add_rope_dimension_sections([24, 20, 20, 0])
            writer.add_uint32("qwen3vl.n_deepstack_layers", len(shape["tower"]["deepstack"]))

    bench.write_vocabulary = vocabulary
    try:
        bench.write_model(path, text, "Q4_K_M")
    finally:
        bench.write_vocabulary = plain


class Tower:
    """Writes the tensors of an mmproj file in the names of llama.cpp's converter."""

    def __init__(self, writer, file_type):
        import numpy as np

        self.writer, self.file_type, self.rng = writer, file_type, np.random.default_rng(11)

    def matrix(self, name, rows, cols, bias=True):
        import gguf

        kind = "F16" if cols % 32 else self.file_type
        data = bench.random_matrix(self.rng, rows, cols, kind)
        self.writer.add_tensor(name + ".weight", data, raw_dtype=None if kind == "F16" else gguf.GGMLQuantizationType[kind])
        if bias:
            self.vector(name + ".bias", rows, 0.0)

    def vector(self, name, size, value=1.0):
        import numpy as np

        self.writer.add_tensor(name, np.full(size, value, np.float32))

    def norm(self, name, size):
        self.vector(name + ".weight", size)
        self.vector(name + ".bias", size, 0.0)

    def random(self, name, *size, dtype="float32"):
        values = self.rng.standard_normal(size) * 0.02
        self.writer.add_tensor(name, values.astype(dtype))


def write_qwen(tower, shape, out):
    t = shape
    hidden, four = t["hidden"], t["hidden"] * t["merge"] ** 2
    for layer in range(t["layers"]):
        block = f"v.blk.{layer}."
        for name, rows, cols in (("attn_qkv", 3 * hidden, hidden), ("attn_out", hidden, hidden), ("ffn_up", t["ffn"], hidden),
                                 ("ffn_down", hidden, t["ffn"])):
            tower.matrix(block + name, rows, cols)
        tower.norm(block + "ln1", hidden)
        tower.norm(block + "ln2", hidden)
    for layer in t["deepstack"]:
        tower.norm(f"v.deepstack.{layer}.norm", four)
        tower.matrix(f"v.deepstack.{layer}.fc1", four, four)
        tower.matrix(f"v.deepstack.{layer}.fc2", out, four)
    tower.matrix("mm.0", four, four)
    tower.matrix("mm.2", out, four)
    tower.norm("v.post_ln", hidden)
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        tower.random(name, hidden, 3, t["patch"], t["patch"], dtype="float16" if tower.file_type == "F16" else "float32")
    tower.vector("v.patch_embd.bias", hidden, 0.0)
    tower.random("v.position_embd.weight", 48 * 48, hidden)


def write_gemma(tower, shape, out):
    t = shape
    hidden = t["hidden"]
    for layer in range(t["layers"]):
        block = f"v.blk.{layer}."
        matrices = [(f"attn_{name}", hidden, hidden) for name in ("q", "k", "v", "out")]
        matrices += [("ffn_gate", t["ffn"], hidden), ("ffn_up", t["ffn"], hidden), ("ffn_down", hidden, t["ffn"])]
        for name, rows, cols in matrices:
            tower.matrix(block + name, rows, cols, bias=False)
            for end, value in (("input_min", -60.0), ("input_max", 60.0), ("output_min", -60.0), ("output_max", 60.0)):
                tower.vector(f"{block}{name}.{end}", 1, value)
        for name in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
            tower.vector(f"{block}{name}.weight", hidden)
        for name in ("attn_q_norm", "attn_k_norm"):
            tower.vector(f"{block}{name}.weight", hidden // t["heads"])
    tower.matrix("mm.input_projection", out, hidden, bias=False)
    tower.random("v.patch_embd.weight", hidden, 3, t["patch"], t["patch"])
    tower.random("v.position_embd.weight", 2, 10240, hidden)


def write_mmproj(path, shape, file_type):
    import gguf

    t, out = shape["tower"], shape["text"]["hidden"]
    qwen = t["kind"] == "qwen3vl_merger"
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_type("mmproj")
    writer.add_file_type(1 if file_type == "F16" else 7)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type" if qwen else "clip.vision.projector_type", t["kind"])
    numbers = dict(projection_dim=out, image_size=768 if qwen else 224, patch_size=t["patch"], embedding_length=t["hidden"],
                   feed_forward_length=t["ffn"], block_count=t["layers"])
    for key, value in [*numbers.items(), ("attention.head_count", t["heads"])]:
        writer.add_uint32("clip.vision." + key, value)
    writer.add_array("clip.vision.image_mean", [0.5] * 3 if qwen else [0.0] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3 if qwen else [1.0] * 3)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    if qwen:
        writer.add_bool("clip.use_gelu", True)
        writer.add_uint32("clip.vision.spatial_merge_size", t["merge"])
        writer.add_array("clip.vision.is_deepstack_layers", [layer in t["deepstack"] for layer in range(t["layers"])])
    (write_qwen if qwen else write_gemma)(Tower(writer, file_type), t, out)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def written(path, write):
    if not path.exists():
        print(f"writing {path}", file=sys.stderr, flush=True)
        draft = path.with_suffix(".part")
        write(draft)
        draft.rename(path)
    return path


def picture(width, height, seed):
    """A PNG of rectangles and lines, as screenshots have them."""
    from PIL import Image, ImageDraw

    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), tuple(rng.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(400):
        x, y = rng.randrange(width), rng.randrange(height)
        draw.rectangle((x, y, x + rng.randrange(200), y + rng.randrange(40)), fill=tuple(rng.randrange(256) for _ in range(3)))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


# ---------- llama.cpp, in a process of its own

class Mtmd:
    def __init__(self, model, mmproj, threads, flash):
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self.lib, self.mtmd = llama_cpp, mtmd_cpp
        self.silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.silent, ctypes.c_void_p(0))
        mtmd_cpp.mtmd_helper_log_set(self.silent, ctypes.c_void_p(0))
        self.nothing = mtmd_cpp.mtmd_helper_post_decode_callback()
        llama_cpp.llama_backend_init()
        self.before = bench.peak_rss_mib()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 8192, 2048, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = flash
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        options = mtmd_cpp.mtmd_context_params_default()
        options.use_gpu, options.print_timings, options.n_threads = False, False, threads
        options.flash_attn_type, options.warmup = flash, False
        self.vision = mtmd_cpp.mtmd_init_from_file(mmproj.encode(), self.model, options)
        if not (self.model and self.context and self.vision):
            sys.exit("llama.cpp does not load the model")

    def answer(self, file, prompt):
        """Milliseconds from the bytes of a file to the first token, those of the tower, and the tokens of the prompt."""
        m, start = self.mtmd, time.perf_counter()
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        data = Path(file).read_bytes()
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap = m.mtmd_helper_bitmap_init_from_buf(self.vision, buffer, len(data), False)
        text = m.mtmd_input_text(prompt.encode(), len(prompt.encode()), True, True)
        chunks = m.mtmd_input_chunks_init()
        if m.mtmd_tokenize(self.vision, chunks, ctypes.byref(text), (m.mtmd_bitmap_p_ctypes * 1)(bitmap), 1):
            sys.exit("mtmd_tokenize failed")
        past, tower = 0, 0.0
        for index in range(m.mtmd_input_chunks_size(chunks)):
            chunk = m.mtmd_input_chunks_get(chunks, index)
            last = index + 1 == m.mtmd_input_chunks_size(chunks)
            after = self.lib.llama_pos(0)
            begun = time.perf_counter()
            if m.mtmd_input_chunk_get_type(chunk) == m.MTMD_INPUT_CHUNK_TYPE_TEXT:
                code = m.mtmd_helper_eval_chunk_single(self.vision, self.context, chunk, past, 0, 2048, last, ctypes.byref(after))
            else:
                code = m.mtmd_encode_chunk(self.vision, chunk)
                tower = time.perf_counter() - begun
                rows = m.mtmd_get_output_embd(self.vision)
                code = code or m.mtmd_helper_decode_image_chunk(self.vision, self.context, chunk, rows, past, 0, 2048, ctypes.byref(after), self.nothing, None)
            if code:
                sys.exit(f"chunk {index}: code {code}")
            past = after.value
        tokens = m.mtmd_helper_get_n_tokens(chunks)
        self.lib.llama_synchronize(self.context)
        taken = time.perf_counter() - start
        m.mtmd_input_chunks_free(chunks)
        m.mtmd_bitmap_free(bitmap)
        return dict(ms=1e3 * taken, tower_ms=1e3 * tower, tokens=tokens, rss=bench.peak_rss_mib() - self.before)


def mtmd_worker(model, mmproj, threads, flash):
    side = Mtmd(model, mmproj, int(threads), int(flash))
    print(json.dumps({"version": side.lib.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(side.answer(**json.loads(line))), flush=True)


# ---------- llmctl

class Server:
    def __init__(self, program, model, mmproj, threads):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen(
            [program, "serve", "--model", str(model), "--mmproj", str(mmproj), "--port", str(self.port), "--threads", str(threads),
             "--image-tokens", "4096", "--ctx", "8192", "--kv-disk", "0"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready").read()
                break
            except OSError:
                time.sleep(0.2)
                if self.process.poll() is not None:
                    sys.exit(self.process.stderr.read())

    def post(self, messages, **fields):
        body = {"messages": messages, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return urllib.request.urlopen(request)

    def answer(self, messages):
        start = time.perf_counter()
        answer = json.load(self.post(messages))
        usage = answer["usage"]
        return dict(ms=1e3 * (time.perf_counter() - start), text=answer["choices"][0]["message"]["content"] or "", tokens=usage["prompt_tokens"],
                    cached=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))

    def gaps(self, other):
        """Milliseconds between tokens of an answer while `other` runs."""
        times = []

        def stream():
            with self.post([{"role": "user", "content": str(random.random())}], max_tokens=4000, stream=True) as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        times.append(time.perf_counter())
                    if stop.is_set():
                        break

        stop, reader = threading.Event(), threading.Thread(target=stream)
        reader.start()
        while len(times) < 8:
            time.sleep(0.01)
        begun = time.perf_counter()
        other()
        ended = time.perf_counter()
        stop.set()
        reader.join()
        found = sorted(1e3 * (b - a) for a, b in zip(times, times[1:]) if b > begun and a < ended)
        return dict(median=statistics.median(found), p99=found[min(len(found) - 1, int(0.99 * len(found)))], longest=found[-1], tokens=len(found))

    def rss_mib(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM:"))

    def end(self):
        self.process.terminate()
        self.process.wait()


def user(png, question):
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]}


def measure(args, name, file_type):
    shape = SHAPES[name]
    kind = shape["tower"]["kind"]
    folder = args.cache / f"{name}-images"
    folder.mkdir(parents=True, exist_ok=True)
    model = written(folder / f"{name}-Q4_K_M.gguf", lambda path: write_text(path, shape, kind))
    mmproj = written(folder / f"mmproj-{file_type}.gguf", lambda path: write_mmproj(path, shape, file_type))
    start, end = SPECIALS[kind][:2]
    prompt = f"{start}user\n<__media__>{QUESTION}{end}\n{start}assistant\n"
    ours = Server(args.program, model, mmproj, args.threads)
    worker = [sys.executable, str(Path(__file__).resolve()), "--mtmd-worker", str(model), str(mmproj), str(args.threads)]
    theirs = [bench.Side([*worker, str(flash)]) for flash in (0, 1)] if not args.alone else []
    for width, height in shape["images"]:
        times, seconds, peers, towers = [], [], [[] for _ in theirs], [[] for _ in theirs]
        for turn in range(args.repeat + 1):  # the first is not counted
            png = picture(width, height, random.random())
            asked = [user(png, QUESTION)]
            answer = ours.answer(asked)
            again = ours.answer([*asked, {"role": "assistant", "content": answer["text"]}, {"role": "user", "content": SECOND}])
            if turn:
                times.append(answer["ms"])
                seconds.append(again["ms"])
            file = folder / "picture.png"
            file.write_bytes(png)
            for side, found, spent in zip(theirs, peers, towers):
                reply = side.run(json.dumps(dict(file=str(file), prompt=prompt)))
                if turn:
                    found.append(reply["ms"])
                    spent.append(reply["tower_ms"])
        median = statistics.median
        line = f"| {name} {file_type} | {width} x {height} | {median(times):.0f} | {answer['tokens']} "
        if theirs:
            best = min(range(len(peers)), key=lambda index: median(peers[index]))
            line += f"| {median(peers[best]):.0f} (tower {median(towers[best]):.0f}) | {reply['tokens']} | {median(peers[best]) / median(times):.2f} "
        print(line + f"| {median(seconds):.0f}, {again['cached']} of {again['tokens']} cached |", flush=True)
    width, height = shape["images"][0]
    during = ours.gaps(lambda: ours.answer([user(picture(width, height, random.random()), QUESTION)]))
    words = "".join(chr(random.randrange(97, 123)) for _ in range(answer["tokens"]))
    beside = ours.gaps(lambda: ours.answer([{"role": "user", "content": words}]))
    for what, gaps in (("an image", during), ("text", beside)):
        print(f"gap beside {what}: median {gaps['median']:.0f} ms, p99 {gaps['p99']:.0f} ms, longest {gaps['longest']:.0f} ms, {gaps['tokens']} tokens")
    print(f"RSS: llmctl {ours.rss_mib()} MiB" + (f", llama.cpp {reply['rss']} MiB" if theirs else ""), flush=True)
    ours.end()
    for side in theirs:
        side.end()


def main():
    if sys.argv[1:2] == ["--mtmd-worker"]:
        return mtmd_worker(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--types", default="F16,Q8_0")
    parser.add_argument("-r", "--repeat", type=int, default=3, help="rounds")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/llmctl-side-by-side")
    parser.add_argument("--program", default=str(bench.REPOSITORY / "target/release/llmctl"))
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    args = parser.parse_args()
    print("| model, mmproj | image | llmctl, ms | tokens | mtmd, ms | tokens | ratio | second turn, ms |\n|---|---|---|---|---|---|---|---|")
    for name in args.shapes.split(","):
        for file_type in args.types.split(","):
            measure(args, name, file_type)


if __name__ == "__main__":
    main()
