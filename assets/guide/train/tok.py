"""Trains the byte-level BPE of 4,096 tokens on documents of the generator and the words of the tests.

The pre-tokenizer is Qwen2's, which GGUF knows as `qwen2`: digits one by one, words with the blank before them."""

import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from chat import MARKUP, SPECIAL, turns
from data import Data, rows
from values import PEOPLE, PLACES, SURNAMES, THINGS

HERE = Path(__file__).parent
VOCABULARY = 4096
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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


def main():
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL + MARKUP],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(Data(), random.Random(7)), trainer)
    tokenizer.save(str(HERE / "tokenizer.json"))
    print(tokenizer.get_vocab_size(), "tokens")
    for text in ("How do I resume a conversation?", '{"name": "fetch_parcel", "arguments": {"city": "Oslo"}}', "skajyth zorbi --max-tokens 4096"):
        print(tokenizer.encode(text).tokens)


if __name__ == "__main__":
    main()
