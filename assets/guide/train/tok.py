"""Trains the byte-level BPE of 4,096 tokens on documents of the generator and the words of the tests.

The pre-tokenizer is Qwen2's, which GGUF knows as `qwen2`: digits one by one, words with the character before them. But the
merges are made so that a word's pieces do not depend on what stands before it: a blank, a quote or an underscore stays a
token of its own, and only the commonest words have a token with the blank. A name in a question and in a tool call is then
the same row of tokens, and copying is copying; with ordinary merges ` Oslo` and `"Oslo` have no token in common."""

import json
import random
import re
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from chat import MARKUP, SPECIAL, turns
from data import Data, held_values, rows
from values import PEOPLE, PLACES, SURNAMES, THINGS

HERE = Path(__file__).parent
VOCABULARY, WITH_BLANK = 4096, 1100
LAST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + LAST
BARE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{L}+|\p{N}" + LAST
"""Qwen2's rule without the character before a word: what merges are learnt on."""
SHARES = {"fact": 9000, "dialog": 1500, "unknown": 5000, "talk": 300, "words": 600, "skill": 1500, "tool": 2500}


def texts(data, r):
    for kind, count in SHARES.items():
        for _ in range(count):
            messages, tools = data.allowed(r, kind)
            yield from (given + answer for _, given, answer in turns(messages, tools))
    # No word of a test shall fall into tokens that training never saw.
    for name in ("free", "oos", "inscope_short", "tools", "results", "skills", "followups"):
        for row in rows(name + ".jsonl"):
            yield from [row["ask"]] if "ask" in row else row["turns"]
    for words in (PLACES, PEOPLE, SURNAMES, THINGS):
        yield from (" ".join(r.sample(words, 8)) for _ in range(60))


def splitter(rule):
    split = pre_tokenizers.Split(Regex(rule), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def pieces(corpus):
    """Vocabulary and merges of bare words, punctuation and white space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter(BARE)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - WITH_BLANK,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL + MARKUP],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]


def common(corpus, vocabulary, copied):
    """The commonest words behind a blank that are one token and that nobody will want to have copied; no letters, since
    half of all names begin with those."""
    counts = Counter(w for text in corpus for w in re.findall(r"(?<= )[A-Za-z]+", text))
    return [w for w, _ in counts.most_common() if w in vocabulary and w not in copied and (len(w) > 1 or w in "aI")][:WITH_BLANK]


def main():
    data = Data()
    corpus = list(texts(data, random.Random(7)))
    vocabulary, merges = pieces(corpus)
    copied = {*PLACES, *PEOPLE, *SURNAMES, *THINGS} | {w for v in held_values() for w in v.split()}
    for word in common(corpus, vocabulary, copied):
        vocabulary["Ġ" + word] = len(vocabulary)
        merges.append(("Ġ", word))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter(QWEN2), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL + MARKUP])
    tokenizer.save(str(HERE / "tokenizer.json"))
    print(tokenizer.get_vocab_size(), "tokens,", sum(len(tokenizer.encode(t).ids) for t in corpus) / len(corpus), "per text")
    for text in ("How do I resume a conversation?", 'Is it dry in Oslo? {"name": "fetch_parcel", "arguments": {"city": "Oslo"}}', "skajyth zorbi --max-tokens 4096"):
        print(tokenizer.encode(text).tokens)


if __name__ == "__main__":
    main()
