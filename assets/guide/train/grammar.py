"""Phrase grammar (`{a|b}`, `<group>`), frames, and the noise of quick typing."""

import re

INNER = re.compile(r"\{([^{}]*)\}")
GROUP = re.compile(r"<([a-z]+)>")

DO_FRAMES = [
    "How do I {x}?", "how do i {x}", "How can I {x}?", "how to {x}", "I want to {x}", "I'd like to {x}", "what is the command to {x}?",
    "is there a way to {x}?", "which flag or command lets me {x}?", "can I {x}?", "{x}, how?", "I need to {x}", "please tell me how to {x}",
    "what do I type to {x}?", "show me how to {x}", "can you tell me how to {x}?", "how does one {x}?", "in llmctl, how do I {x}?",
    "how would I {x} with llmctl?", "trying to {x}", "{x}", "{x} please", "can llmctl {x}?", "what if I want to {x}?", "let me {x}",
    "trying to {x} but don't know how", "how should I {x}?", "what do I do to {x}?", "is it possible to {x}?", "I would like to {x}, please",
    "command to {x}", "way to {x}", "need to {x}", "help me {x}", "how do you {x}", "is there something to {x}?", "I can't figure out how to {x}",
    "where do I start if I want to {x}?", "does llmctl have a way to {x}?", "what should I run to {x}?", "so how do I {x} here?",
    "explain how to {x}", "do you know how to {x}?", "how am I supposed to {x}?", "tell me how I can {x}", "my goal is to {x}",
    "could I {x}?", "which command do I need to {x}?", "any option to {x}?", "I don't know how to {x}",
    "I'm looking for a way to {x}", "what do I have to do to {x}?", "would it be possible to {x}?", "give me the command to {x}",
    "what flag do I need to {x}?", "I have to {x}", "I'm trying to {x}", "how could I {x}?", "looking to {x}", "I wish to {x}",
    "steps to {x}", "how exactly do I {x}?", "whats the way to {x}", "the command that lets me {x}?", "could you tell me how to {x}?",
    "I'm new here, how do I {x}?", "{x} - possible?", "do you have something to {x}?", "I'd love to {x}", "what is needed to {x}?",
    "please explain how one can {x}", "my question is how to {x}", "I must {x}, how does that work?", "what lets me {x}?",
]
THING_FRAMES = [
    "what is {x}?", "what does {x} do?", "what does {x} mean?", "explain {x}", "tell me about {x}", "{x}?", "{x}", "what is {x} for?",
    "when do I use {x}?", "describe {x}", "meaning of {x}", "how does {x} work?", "what about {x}?", "please explain {x}", "help on {x}",
    "{x} help", "how do I use {x}?", "info on {x}", "why would I use {x}?", "what can {x} do?", "I don't understand {x}", "usage of {x}",
    "how is {x} used?", "what exactly is {x}?", "what's {x}", "{x} explained", "can you explain {x}?", "somebody mentioned {x}", "not sure what {x} is",
    "give me a short explanation of {x}", "what's {x} good for?", "what do I need {x} for?", "purpose of {x}", "{x} in simple words",
    "define {x}", "what's the deal with {x}?", "I read about {x}, what does it do?", "{x}: meaning?", "what's that, {x}?", "is {x} important for me?",
    "I stumbled over {x}", "question about {x}",
]
HELD_DO_FRAMES = [
    "what's the trick to {x}?", "any idea how I could {x}?", "I am attempting to {x}, what should I use?", "what would I use if I wanted to {x}?",
    "could you walk me through how to {x}?", "what must I enter in order to {x}?", "best way to {x}?", "anyone know how to {x}?",
    "I was wondering how to {x}", "suppose I wanted to {x}, what then?", "quickest route to {x}?", "got a tip on how to {x}?",
]
HELD_THING_FRAMES = [
    "I saw {x} in the docs, what is that?", "help me understand {x}", "what's the point of {x}?", "{x} - what is this?",
    "could you clarify {x}?", "remind me what {x} is about",
]
LEADS = ["hi, ", "hey, ", "hello, ", "hi! ", "please, ", "ok, ", "quick question: ", "sorry, ", "um, ", "so ", "and ", "well, ", "one question, ",
         "Hello guide, ", "hey guide, ", "now ", "tell me, ", "excuse the question, "]
TAILS = [" please", " pls", " thanks", " in llmctl", " with llmctl", ", thanks", " again", " here", ", please help", " quickly", " now", " then"]
SMALL = set("a an the my this that to of in on for with is are do does i it can how what me be and or at from by so please want would like".split())
SWAPPED = """last see change choose delete continue turnoff turnon measure compare fast slow folder setting error rename fix find explain
machine again several forbid interrupt""".split()
"""Groups whose words mean the same everywhere; others ("run", "prompt", "network") are too much else."""
CASUAL = [(" I ", " i "), ("I'd", "id"), ("what is", "whats"), ("What is", "What's"), ("do not", "dont"), ("don't", "dont"), ("can't", "cant"),
          ("you", "u"), ("please", "pls"), ("How do I", "how 2"), ("want to", "wanna"), ("going to", "gonna"), (" and ", " & "), ("because", "cuz")]
NEAR_KEYS = dict(zip("qwertyuiopasdfghjklzxcvbnm", "wertyuiopoasdfghjklkzxcvbn"))


def expand(r, phrase, words, held=False):
    """One reading of a phrase; `held` takes the thesaurus' held words, which only tests and drills do."""
    while found := INNER.search(phrase):
        phrase = phrase[: found.start()] + r.choice(found.group(1).split("|")) + phrase[found.end() :]
    known = lambda m: r.choice(words[m[1]]["held" if held else "train"]) if m[1] in words else m[0]
    phrase = GROUP.sub(known, phrase)
    return re.sub(r" +", " ", phrase).strip()


def typo(r, word):
    """A slip of the fingers inside a word of some length."""
    at, kind = r.randrange(1, len(word) - 1), r.random()
    if kind < 0.35:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind < 0.65:
        return word[:at] + word[at + 1 :]
    if kind < 0.85:
        return word[:at] + word[at] + word[at:]
    return word[:at] + NEAR_KEYS.get(word[at], word[at]) + word[at + 1 :]


def typos(r, text, rate):
    return " ".join(typo(r, w) if len(w) > 3 and w.isalpha() and r.random() < rate else w for w in text.split(" "))


def soup(r, text):
    """Key words only, perhaps in another order: as people type into a search field."""
    words = [w.strip("?.,!") for w in text.split()]
    kept = [w for w in words if w.lower() not in SMALL and r.random() < 0.9] or words
    if r.random() < 0.5:
        r.shuffle(kept)
    return " ".join(kept)


def swap(r, text, words):
    """Other words of the thesaurus, also where the writer of a phrase did not ask for them."""
    changed = []
    for word in text.split(" "):
        group = next((words[g]["train"] for g in SWAPPED if word in words[g]["train"]), [word])
        changed.append(r.choice(group) if r.random() < 0.5 else word)
    return " ".join(changed)


def estrange(r, text, values):
    """Puts words that nobody knows, or that belong elsewhere, for a third of those that count."""
    words = text.split(" ")
    counting = [n for n, w in enumerate(words) if w.lower().strip("?.,!") not in SMALL]
    chosen = [n for n in counting if r.random() < 0.35] or [r.choice(counting or [0])]
    for n in chosen[: max(1, len(counting) - 1)]:
        words[n] = values.word(r, 0.5)
    return " ".join(words)


def thin(r, text, others):
    """Drops some words, and now and then puts a foreign one in: the model must lean on whatever is left."""
    words = []
    for w in text.split():
        k = r.random()
        if k < 0.12:
            continue
        words.append(r.choice(others) if k < 0.15 and w.lower() in SMALL else w)
    return " ".join(words) or text


def casual(r, text):
    """Greeting, politeness, case, punctuation, slips."""
    is_code = text[:1] in "/-`"
    k = r.random()
    if not is_code and k < 0.12:
        text = r.choice(LEADS) + text
    elif not is_code and k < 0.22:
        text = text.rstrip("?.") + r.choice(TAILS) + ("?" if text.endswith("?") else "")
    if r.random() < 0.15:
        for plain, quick in CASUAL:
            if r.random() < 0.5:
                text = text.replace(plain, quick)
    if r.random() < 0.35:
        text = text.rstrip("?.")
    elif r.random() < 0.1:
        text = text.rstrip("?.") + r.choice(["??", "?!", "...", "!", "."])
    if r.random() < 0.4:
        text = text[:1].upper() + text[1:]
    elif r.random() < 0.3:
        text = text.lower()
    if r.random() < 0.02:
        text = text.upper()
    return typos(r, text, r.choice([0.08, 0.15, 0.25])) if r.random() < 0.25 else text
