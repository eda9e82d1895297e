"""Small skills (repeat, spell, count, JSON) and the drills that teach copying before anything else."""

from chat import assistant, dumps, user
from tools import say
from values import invented, word

LEADS = ["repeat: {s}", "repeat {s}", "say {s}", "echo {s}", "write exactly: {s}", "repeat after me: {s}", 'say "{s}"', "say exactly this: {s}",
         "please repeat: {s}", "repeat this: {s}", 'repeat the text "{s}"', "say only {s}", "output {s}", "just say {s}", "type {s}", "repeat the word {s}",
         "write {s} and nothing else", "print: {s}", "copy this: {s}", "Can you repeat {s}?", "answer with {s}", "reply with just {s}", "say the word {s}"]
SPELLS = ["spell {w}", "how do you spell {w}?", "spell the word {w}", "please spell {w}", "spell {w} letter by letter", "can you spell {w}",
          "what are the letters of {w}?", "give me the letters of {w}", "spell: {w}", 'spell "{w}"', "the letters in {w}", "spell out {w}"]
COUNTS = ["count from {a} to {b}", "count {a} to {b}", "please count from {a} to {b}", "count up from {a} to {b}", "numbers from {a} to {b}",
          "list the numbers {a} to {b}", "can you count from {a} to {b}?", "count from {a} up to {b}", "say the numbers from {a} to {b}"]
COUNTS_TO = ["count to {b}", "count up to {b}", "please count to {b}", "can you count to {b}?", "numbers up to {b}"]
JSON_ASKS = ["give me JSON with {l}", "JSON with {l}", "write a JSON object: {l}", "make JSON: {l}", "JSON object with {l}", "as JSON: {l}", "{l} as JSON",
             "write JSON for {l}", "return JSON: {l}", "turn this into JSON: {l}", "make a JSON object with {l}", "put {l} into JSON", "convert to JSON: {l}",
             "I need a JSON object: {l}"]
KEYED = ["Make a JSON object with {k}: {t}", "JSON with the keys {k}: {t}", "Extract {k} as JSON: {t}", "{t} Give me {k} as JSON.", "{t} JSON with {k} please",
         "Read this and write JSON with {k}: {t}"]
SENTENCES = [
    ("{name} is {age} years old.", {"name": "person", "age": "small"}),
    ("{name} lives in {city}.", {"name": "person", "city": "place"}),
    ("{name} from {city} is {age}.", {"name": "person", "city": "place", "age": "small"}),
    ("The {item} costs {price} {currency}.", {"item": "thing", "price": "number", "currency": "currency"}),
    ("We sold {count} of {item}.", {"item": "thing", "count": "int"}),
    ("The {color} {object} is in the {room}.", {"color": "color", "object": "thing", "room": "room"}),
    ("{title} was written by {author} in {year}.", {"title": "name", "author": "person", "year": "int"}),
    ("Meet {person} on {date} at {time}.", {"person": "person", "date": "date", "time": "time"}),
    ("Train {train} leaves {city} at {time}.", {"train": "code", "city": "place", "time": "time"}),
    ("My name is {name} and my mail is {email}.", {"name": "person", "email": "email"}),
    ("Order {order}: {quantity} {product}.", {"order": "code", "quantity": "small", "product": "thing"}),
    ("The file {file} has {lines} lines.", {"file": "file", "lines": "int"}),
    ("{animal} eats {food}.", {"animal": "thing", "food": "thing"}),
    ("{team} won with {points} points.", {"team": "name", "points": "int"}),
    ("It is {degrees} degrees in {city}.", {"city": "place", "degrees": "small"}),
]


def words(r, low, high):
    return [word(r, 0.6) for _ in range(r.randrange(low, high))]


def repeat(r, values):
    k = r.random()
    text = " ".join(words(r, 1, 6)) if k < 0.4 else values.phrase(r) if k < 0.75 else values.draw(r, r.choice(["name", "place", "code", "email", "file", "date"]))
    if r.random() < 0.25:
        text = r.choice(["the {} is late", "I like {}", "we have {} today", "never mind the {}", "my {} is blue", "there are seven {} here"]).format(text)
    if r.random() < 0.3:
        text = text[0].upper() + text[1:] + r.choice(["", ".", "!"])
    return [user(r.choice(LEADS).format(s=text)), assistant(text)]


def spell(r, values):
    w = r.choice([invented(r), values.thing(r), values.person(r).split()[0], values.place(r).split()[0]])
    return [user(r.choice(SPELLS).format(w=w)), assistant("-".join(w))]


def count(r, values):
    if r.random() < 0.3:
        a, b, ask = 1, r.randrange(3, 21), r.choice(COUNTS_TO)
    else:
        a = r.choice([1, 1, r.randrange(0, 30), r.randrange(0, 100)])
        b, ask = a + r.randrange(2, 12), r.choice(COUNTS)
    return [user(ask.format(a=a, b=b)), assistant(", ".join(map(str, range(a, b + 1))))]


def as_json(r, values):
    if r.random() < 0.5:
        sentence, kinds = r.choice(SENTENCES)
        found = {k: values.draw(r, kind) for k, kind in kinds.items()}
        text = sentence
        for k, v in found.items():
            text = text.replace("{" + k + "}", str(v))
        keys = list(found)
        listed = ", ".join(keys[:-1]) + " and " + keys[-1] if r.random() < 0.7 else ", ".join(keys)
        return [user(r.choice(KEYED).format(k=listed, t=text)), assistant(dumps(found))]
    kinds = ["thing", "person", "place", "int", "small", "boolean", "color", "number", "code"]
    found = {word(r, 0.3) if r.random() < 0.6 else r.choice("name age city color size count id title price day".split()): values.draw(r, r.choice(kinds)) for _ in range(r.choice([1, 2, 2, 3]))}
    form = r.choice(["{p} {v}", "{p} {v}", "{p}: {v}", "{p}={v}", "{p} is {v}"])
    listed = r.choice([", ", " and "]).join(form.format(p=p, v=say(v)) for p, v in found.items())
    return [user(r.choice(JSON_ASKS).format(l=listed)), assistant(dumps(found))]


def skill(r, values):
    """One of the four skills that users can ask for."""
    return r.choice([repeat, spell, count, as_json])(r, values)


def drill(r, values, pieces):
    """A copying exercise on random tokens and words, without daily language: this is where induction comes from."""
    any_word = lambda: "".join(r.choice(pieces) for _ in range(r.choice([1, 1, 2]))) if r.random() < 0.6 else word(r, 0.6)
    k = r.random()
    if k < 0.35:
        text = " ".join(any_word() for _ in range(r.randrange(3, 14)))
        return [user(r.choice(["repeat: {s}", "say {s}", "{s}", "echo {s}"]).format(s=text)), assistant(text)]
    pairs = {any_word(): values.draw(r, r.choice(["thing", "int", "place", "code", "phrase", "name"])) for _ in range(r.randrange(2, 7))}
    listed = ", ".join(r.choice(["{}: {}", "{}={}"]).format(k, v) for k, v in pairs.items())
    keys = list(pairs)
    if k < 0.6:
        # The value of one key, several times: each answer is a look-up.
        messages = []
        for n, key in enumerate(r.sample(keys, min(len(keys), r.choice([1, 2, 3])))):
            ask = r.choice(["{k}?", "what is {k}?", "give me {k}", "value of {k}"]).format(k=key)
            messages += [user(f"{listed}. {ask}" if n == 0 else ask), assistant(str(pairs[key]))]
        return messages
    if k < 0.8:
        picked = r.sample(keys, r.randrange(1, len(keys) + 1))
        return [user(f"{listed}. JSON with {', '.join(picked)}"), assistant(dumps({p: pairs[p] for p in picked}))]
    if k < 0.9:
        # Which of several lists has the word.
        lists = {any_word(): [any_word() for _ in range(r.randrange(1, 4))] for _ in range(3)}
        home = r.choice(list(lists))
        text = "; ".join(f"{n}: {' '.join(ws)}" for n, ws in lists.items())
        return [user(f"{text}. where is {r.choice(lists[home])}?"), assistant(home)]
    ws = [any_word() for _ in range(r.randrange(2, 6))]
    joint = r.choice(["_", "-", ".", "/"])
    return [user(f"join with {joint}: {' '.join(ws)}"), assistant(joint.join(ws))]
