"""Random cases of samplers with the candidates and probabilities of llama.cpp's own, for src/runtime/sample/order.rs.

    pip install llama-cpp-python==0.3.36 numpy
    python3 tests/parity-samplers/make.py VOCAB.gguf COUNT > cases.jsonl

VOCAB.gguf is any model with a BPE vocabulary; only that is read. COUNT is the number of cases of each sampler, and ten times
as many steps of Mirostat. `LLMCTL_SAMPLER_CASES=cases.jsonl` lets the test `llama_cpp_keeps_the_same_tokens` read them; the
file cases.jsonl beside this script has few of them and is read always (SmolLM2-135M-Instruct, COUNT 8).

The first line has 64 tokens' bytes in hexadecimal and the tokens of the rests of sequence breakers; the others are cases:
`sampling` (numbers), `samplers` (an order, or absent with Mirostat), `top_k`, `dry_sequence_breakers`, `history` (ids),
`logits` (by id; null for tokens that are no candidates), `expected` (pairs of id and probability). A case of Mirostat has
`steps` instead, each with `logits`, `expected` and `chosen`.
"""
import ctypes
import json
import math
import random
import sys

import llama_cpp as lc
import numpy as np

SIZE = 64
EVERYTHING = 4096
ORDERS = ["penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"]
SILENT = lc.llama_log_callback(lambda *_: None)
rng = random.Random(7)


def load(path):
    lc.llama_log_set(SILENT, None)
    params = lc.llama_model_default_params()
    params.vocab_only = True
    return lc.llama_model_get_vocab(lc.llama_model_load_from_file(path.encode(), params))


def tokenize(vocab, text):
    data = text.encode()
    ids = (lc.llama_token * (len(data) + 8))()
    count = lc.llama_tokenize(vocab, data, len(data), ids, len(ids), False, False)
    assert count >= 0, text
    return list(ids[:count])


def piece(vocab, token):
    buffer = ctypes.create_string_buffer(256)
    count = lc.llama_token_to_piece(vocab, token, buffer, 256, 0, True)
    return buffer.raw[:count]


def choose_words(vocab):
    texts = ["\n", "\n\n", ":", '"', "*", "**", ' "', '."', "a", "b", "ab", "the", " the", " cat", " cats", " dog", "x y", "\nThe",
             "q:", "s", "'s", ".", ",", " a", " b", " of", " and", "and", "in", " in", "ing", "er", "::", '":', " *", ".\n"]
    words = [ids[0] for ids in (tokenize(vocab, text) for text in texts) if len(ids) == 1]
    while len(words) < SIZE:
        word = rng.randrange(400, 3000)
        if word not in words and piece(vocab, word).isascii():
            words.append(word)
    return list(dict.fromkeys(words))


def distinct_logits(count):
    return [value / 1000 for value in rng.sample(range(-9000, 9000), count)]


def random_logits():
    scale = rng.choice([0.2, 0.5, 1, 1])
    ids = rng.sample(range(SIZE), rng.randint(2, rng.choice([8, 40, SIZE])))
    values = dict(zip(ids, distinct_logits(len(ids))))
    return [round(values[i] * scale, 4) if i in values else None for i in range(SIZE)]


def random_history():
    letters = rng.sample(range(SIZE), rng.randint(1, 6))
    history = [rng.choice(letters) for _ in range(rng.randint(0, 60))]
    if history and rng.random() < 0.6:
        start = rng.randrange(len(history))
        history += history[start : start + rng.randint(1, 12)]
    return history


def apply(samplers, words, logits):
    """Returns the candidates that samplers leave one after another, and the selected one."""
    ids = [i for i in range(SIZE) if logits[i] is not None]
    data = (lc.llama_token_data * len(ids))(*[lc.llama_token_data(words[i], logits[i], 0.0) for i in ids])
    array = lc.llama_token_data_array(data, len(ids), -1, False)
    for one in samplers:
        values = [array.data[i].logit for i in range(array.size)]
        if lc.llama_sampler_name(one) == b"typical" and max(values) - min(values) > 85:
            return None, None  # its entropy is NaN where a probability is 0
        lc.llama_sampler_apply(one, ctypes.byref(array))
    left = [array.data[i] for i in range(array.size)]
    values = np.array([entry.logit for entry in left], dtype=np.float64)
    if not np.isfinite(values.max()):
        return None, None  # llama.cpp left infinity or NaN
    weights = np.exp(values - values.max())
    own = {word: i for i, word in enumerate(words)}
    pairs = sorted((own[e.id], round(p, 9)) for e, p in zip(left, weights / weights.sum()) if p > 1e-30)
    return pairs, own[left[array.selected].id] if array.selected >= 0 else None


def whole_or(value, chance, other):
    return other if rng.random() < chance else value


def window(last_n):
    return EVERYTHING if last_n < 0 else last_n


def random_sampling(kinds):
    """Numbers for the samplers of an order."""
    u = rng.uniform
    numbers = {}
    if "temperature" in kinds:
        numbers["temperature"] = round(u(0.05, 2), 3)
        if rng.random() < 0.7:
            numbers |= {"dynatemp_range": round(u(0.01, 2), 3), "dynatemp_exponent": round(u(0, 4), 3)}
    if "penalties" in kinds:
        numbers |= {"repetition_penalty": round(u(0.3, 2), 3), "presence_penalty": round(u(-2, 2), 3)}
        numbers |= {"frequency_penalty": round(u(-2, 2), 3), "repeat_last_n": rng.choice([-1, -1, 0, 3, 10, 30])}
    if "dry" in kinds:
        numbers |= {"dry_multiplier": round(u(0.05, whole_or(3, 0.1, 90)), 3), "dry_base": round(u(0.9, 3), 3)}
        numbers |= {"dry_allowed_length": rng.randint(0, 4), "dry_penalty_last_n": rng.choice([-1, -1, 0, 3, 10, 30])}
    if "xtc" in kinds:
        numbers |= {"xtc_probability": rng.choice([1, 1, 1, 0]), "xtc_threshold": round(u(0, 0.55), 4)}
    for name, value in [("top_n_sigma", u(0.1, 3)), ("typical_p", u(0.02, 1)), ("top_p", u(0.02, 1)), ("min_p", u(0, 1))]:
        if name in kinds:
            numbers[name] = round(value, 4)
    return numbers


class Reference:
    def __init__(self, vocab, words):
        self.vocab, self.words, self.dry = vocab, words, (None, None)
        join = lambda count: "".join(piece(vocab, rng.choice(words)).decode() for _ in range(count))
        self.breakers = [None, None, [], ["\n"]] + [[join(rng.randint(1, 3))[:40] for _ in range(4)] for _ in range(12)]

    def init_dry(self, numbers, breakers):
        breakers = ["\n", ":", '"', "*"] if breakers is None else breakers
        key = json.dumps([numbers, breakers])
        if self.dry[0] != key:
            texts = (ctypes.c_char_p * len(breakers))(*[text.encode() for text in breakers])
            last_n = window(numbers["dry_penalty_last_n"])
            self.dry = key, lc.llama_sampler_init_dry(
                self.vocab, numbers["dry_multiplier"], numbers["dry_base"], numbers["dry_allowed_length"], last_n,
                ctypes.cast(texts, ctypes.POINTER(ctypes.c_char_p)), len(breakers))
        lc.llama_sampler_reset(self.dry[1])
        return self.dry[1]

    def sampler(self, name, n, top_k, breakers):
        match name:
            case "penalties":
                return lc.llama_sampler_init_penalties(
                    lc.llama_vocab_n_tokens(self.vocab), window(n["repeat_last_n"]), n["repetition_penalty"],
                    n["frequency_penalty"], n["presence_penalty"])
            case "dry": return self.init_dry({k: v for k, v in n.items() if k.startswith("dry")}, breakers)
            case "top_n_sigma": return lc.llama_sampler_init_top_n_sigma(n[name])
            case "top_k": return lc.llama_sampler_init_top_k(top_k)
            case "typical_p": return lc.llama_sampler_init_typical(n[name], 0)
            case "top_p": return lc.llama_sampler_init_top_p(n[name], 0)
            case "min_p": return lc.llama_sampler_init_min_p(n[name], 0)
            case "xtc": return lc.llama_sampler_init_xtc(n["xtc_probability"], n["xtc_threshold"], 0, 1)
            case "temperature":
                range_, exponent = n.get("dynatemp_range", 0), n.get("dynatemp_exponent", 1)
                return lc.llama_sampler_init_temp_ext(n["temperature"], range_, exponent)

    def case(self, order, numbers, breakers):
        top_k = rng.randint(1, 40) if "top_k" in order else None
        logits, history = random_logits(), random_history()
        case = {"sampling": numbers, "samplers": order, "logits": logits}
        if {"dry", "penalties"} & set(order):
            case["history"] = history
        if top_k:
            case["top_k"] = top_k
        if "dry" in order and breakers is not None:
            case["dry_sequence_breakers"] = breakers
        samplers = [self.sampler(name, numbers, top_k, breakers) for name in order]
        for token in history:
            for one in samplers:
                lc.llama_sampler_accept(one, self.words[token])
        case["expected"], _ = apply(samplers, self.words, logits)
        for name, one in zip(order, samplers):  # DRY samplers live on: their vocabulary takes long to read
            if name != "dry":
                lc.llama_sampler_free(one)
        return case if case["expected"] else None

    def mirostat(self, version, num_steps):
        n = {"mirostat": version, "mirostat_tau": round(rng.uniform(0.2, 6), 3), "mirostat_eta": round(rng.uniform(0, 1), 3)}
        n["temperature"] = round(rng.uniform(0.2, 2), 3)
        init = {
            1: lambda: lc.llama_sampler_init_mirostat(SIZE, rng.getrandbits(31), n["mirostat_tau"], n["mirostat_eta"], 100),
            2: lambda: lc.llama_sampler_init_mirostat_v2(rng.getrandbits(31), n["mirostat_tau"], n["mirostat_eta"]),
        }
        first, sampler, steps = lc.llama_sampler_init_temp(n["temperature"]), init[version](), []
        bound = 2 * n["mirostat_tau"]
        for _ in range(num_steps):
            logits = random_logits()
            # llama.cpp converts a count beyond int to one token, the paper's formula keeps all: such a case ends here.
            if version == 1 and zipf_count([x / n["temperature"] for x in logits if x is not None], bound) > 1e9:
                break
            expected, chosen = apply([first, sampler], self.words, logits)
            steps.append({"logits": logits, "expected": expected, "chosen": chosen})
            bound -= n["mirostat_eta"] * (-math.log2(dict(expected)[chosen]) - n["mirostat_tau"])
        lc.llama_sampler_free(first)
        lc.llama_sampler_free(sampler)
        return {"sampling": n, "steps": steps}


def zipf_count(logits, bound):
    best = sorted(logits, reverse=True)[:100]
    steps = [math.log((i + 2) / (i + 1)) for i in range(len(best) - 1)]
    exponent = sum(s * (best[i] - best[i + 1]) for i, s in enumerate(steps)) / sum(s * s for s in steps)
    epsilon = exponent - 1
    try:
        return ((epsilon * 2**bound) / (1 - SIZE**-epsilon)) ** (1 / exponent)
    except (OverflowError, ZeroDivisionError):
        return math.inf


def main(path, count):
    vocab = load(path)
    words = choose_words(vocab)[:SIZE]
    reference = Reference(vocab, words)
    own = {word: i for i, word in enumerate(words)}
    texts = {text for texts in reference.breakers for text in texts or []}
    rests = {text[at:] for text in texts for at in range(1, len(text))}
    tails = {rest: [own.get(id_, EVERYTHING) for id_ in tokenize(vocab, rest)] for rest in sorted(rests)}
    print(json.dumps({"words": [piece(vocab, word).hex() for word in words], "tails": tails}))
    out = lambda case: print(json.dumps(case, separators=(",", ":")))
    for kind in ORDERS:
        for at in range(count):
            if at % 50 == 0 or kind != "dry" or count < 50:
                numbers, breakers = random_sampling([kind]), rng.choice(reference.breakers)
            while not (case := reference.case([kind], numbers, breakers)):
                pass
            out(case)
    chained = [name for name in ORDERS if name != "dry"] + ["dry"]
    for at in range(count):
        if at % 20 == 0 or count < 50:
            dry, breakers = random_sampling(["dry"]), rng.choice(reference.breakers)
        case = None
        while not case:
            order = rng.sample(chained, rng.randint(2, len(chained)))
            numbers = random_sampling([n for n in order if n != "dry"]) | dry
            case = reference.case(order, numbers, breakers)
        out(case)
    for version in [1, 2]:
        for _ in range(max(count // 10, 1)):
            out(reference.mirostat(version, 10 if count > 50 else 4))


main(sys.argv[1], int(sys.argv[2]))
