"""Small skills (repeat, spell, count, JSON) and the drills that teach copying before anything else."""

import re

from chat import assistant, dumps, user
from tools import say
from values import invented

LEADS = """repeat: {s}|repeat {s}|say {s}|echo {s}|echo: {s}|write exactly: {s}|repeat after me: {s}|repeat after me {s}|say "{s}"|say exactly this: {s}|please repeat: {s}|repeat this: {s}
repeat the text "{s}"|say only {s}|output {s}|just say {s}|type {s}|repeat the word {s}|write {s} and nothing else|print: {s}|copy this: {s}|can you repeat {s}?|answer with {s}
reply with just {s}|say the word {s}|say it after me: {s}|repeat this sentence: {s}|repeat my words: {s}|now say: {s}|please say {s}|could you say "{s}"?|repeat "{s}"|echo back {s}
write this down word for word: {s}|give me back exactly this: {s}|only say this: {s}|your answer is only: {s}|say after me: {s}|repeat exactly: {s}|parrot this: {s}|the text to repeat is: {s}
I say {s}, you say it too|I want you to say {s}|your answer shall be {s}|write the words {s}|nothing but this please: {s}|repeat, please: {s}|{s} - repeat that|say the following: {s}
copy the text "{s}"|type this for me: {s}|print "{s}"|repeat what I say: {s}|reply: {s}|reply with this text: {s}|answer only this: {s}""".replace("\n", "|").split("|")
SPELLS = """spell {w}|how do you spell {w}?|spell the word {w}|please spell {w}|spell {w} letter by letter|can you spell {w}?|what are the letters of {w}?|give me the letters of {w}|spell: {w}
spell "{w}"|the letters in {w}|spell out {w}|spell {w} for me|how is {w} spelled?|could you spell the word "{w}"?|{w}, letter by letter|the word {w} spelled out|letters of the word {w}
spell {w} with dashes|spell {w}, a dash between the letters|please spell the word {w} with dashes|which letters has {w}?|spelling of {w}|spell the name {w}""".replace("\n", "|").split("|")
COUNTS = """count from {a} to {b}|count {a} to {b}|please count from {a} to {b}|count up from {a} to {b}|numbers from {a} to {b}|list the numbers {a} to {b}|can you count from {a} to {b}?
count from {a} up to {b}|say the numbers from {a} to {b}|write the numbers from {a} to {b}|start at {a} and count to {b}|all numbers between {a} and {b}|give me {a} to {b}""".replace("\n", "|").split("|")
COUNTS_TO = ["count to {b}", "count up to {b}", "please count to {b}", "can you count to {b}?", "numbers up to {b}", "count for me up to {b}", "count until {b}"]
COUNT_TAILS = ["", "", "", "", " please", ", with commas", " with commas between", ", comma separated", " on one line", ", only the numbers", " and stop"]
JSON_ASKS = """give me JSON with {l}|JSON with {l}|write a JSON object: {l}|make JSON: {l}|JSON object with {l}|as JSON: {l}|{l} as JSON|write JSON for {l}|return JSON: {l}|turn this into JSON: {l}
make a JSON object with {l}|put {l} into JSON|convert to JSON: {l}|I need a JSON object: {l}|in JSON please: {l}|{l}. JSON please|a JSON object: {l}|please write {l} as a JSON object
answer in JSON: {l}|JSON: {l}|{l}, in JSON|format as JSON: {l}|only JSON: {l}""".replace("\n", "|").split("|")
KEYED = """make a JSON object with {k}: {t}|JSON with the keys {k}: {t}|extract {k} as JSON: {t}|{t} Give me {k} as JSON.|{t} JSON with {k} please|read this and write JSON with {k}: {t}
{t} Which {k}? Answer as JSON.|JSON with {k} from this: {t}|{t} Write that as JSON with {k}.|write JSON ({k}): {t}|find {k} and answer in JSON: {t}|as a JSON object with {k}: {t}
from "{t}" make JSON with {k}|put this into JSON, keys {k}: {t}|the keys are {k}, write JSON: {t}|in JSON with {k}: {t}|please give JSON with {k} for this sentence: {t}
return {k} in JSON. {t}|I need {k} as JSON. {t}|answer with JSON, keys: {k}. {t}|{t} As JSON, keys {k}.|one JSON object, keys {k}. {t}|convert into JSON with {k}: {t}|{k} as JSON please: {t}""".replace("\n", "|").split("|")
SENTENCES = """{name:person} is {age:small} years old|{name:person} lives in {city:place}|{name:person} from {city:place} is {age:small}|the {item:thing} costs {price:number} {currency:currency}
we sold {count:int} of {item:thing}|the {color:color} {object:thing} is in the {room:room}|{title:name} was written by {author:person} in {year:int}|meet {person:person} on {date:date} at {time:time}
train {train:code} leaves {city:place} at {time:time}|my name is {name:person} and my mail is {email:email}|order {order:code}: {quantity:small} {product:thing}|the file {file:file} has {lines:int} lines
{animal:thing} eats {food:thing}|{team:name} won with {points:int} points|it is {degrees:small} degrees in {city:place}|{capital:place} is the capital of {country:place}|{city:place} lies in {country:place}
a {animal:thing} has {legs:small} legs|the {fruit:thing} is {color:color}|our {pet:thing} is called {name:person}|the cat {name:person} is {age:small} years old|{song:name} is a song by {artist:person}
the film {title:name} is from {year:int}|{film:name} came to the cinema in {year:int}|we see each other on {date:date} in {place:place}|the {event:thing} is on {date:date}|{file:file} is {size:int} bytes long
her first name is {first:person}, her last name {last:person}|he is called {first:person} {last:person}|call {name:person} at {phone:phone}|write to {name:person} at {email:email}|{name:person} has the mail {email:email}
the {product:thing} is {price:number}, we have {stock:int}|flight {flight:code} goes from {from:place} to {to:place}|a {size:adjective} {shape:thing} made of {material:thing}|{user:slug} logged in at {time:time}
the server {host:host} runs version {version:version}|{person:person} drinks {drink:thing} and eats {food:thing}|{player:person} scored {goals:digit} goals|room {room:code} has {beds:digit} beds
{name:person} works as {job:thing} in {city:place}|{name:person} speaks {language:language}|the {tool:thing} weighs {weight:number} kilos|{book:name} has {pages:int} pages|the word {word:word} has {letters:small} letters
{city:place} has {people:int} people|bus {line:small} goes to {stop:place}|{task:phrase} until {deadline:date}|{recipe:thing} needs {minutes:small} minutes|the password of {user:slug} is {password:code}
{country:place} pays in {currency:currency}|{plant:thing} grows in the {place:room}|the {vehicle:thing} has the plate {plate:code}|{winner:person} beat {loser:person}|{month:thing} has {days:small} days""".replace("\n", "|").split("|")
HOLE = re.compile(r"\{(\w+):(\w+)\}")


def asked(r, lead, **parts):
    """A lead with its parts, which keep their letters; its own first letter may be a capital."""
    if r.random() < 0.5 and lead[0] != "{":
        lead = lead[0].upper() + lead[1:]
    if lead[-1] == "?" and r.random() < 0.3:
        lead = lead[:-1]
    if lead[0] != "{" and r.random() < 0.06:
        lead = r.choice(["hi, ", "now ", "ok, ", "please, ", "and ", "hey, "]) + lead
    return user(lead.format(**parts))


def repeat(r, values):
    k = r.random()
    if k < 0.25:
        text = " ".join(values.word(r, 0.4) for _ in range(r.randrange(1, 7)))
    elif k < 0.65:
        text = values.sentence(r)
    elif k < 0.8:
        text = values.phrase(r)
    else:
        text = " ".join(str(values.draw(r, r.choice(["name", "place", "code", "email", "file", "date", "person", "int", "word"]))) for _ in range(r.choice([1, 1, 2, 3])))
    if r.random() < 0.2:
        text = text[0].upper() + text[1:] + r.choice(["", ".", "!"])
    return [asked(r, r.choice(LEADS), s=text), assistant(text)]


def spell(r, values):
    w = r.choice([invented(r), values.word(r, 0), values.word(r, 0), values.thing(r), values.person(r).split()[0], values.place(r).split()[0]])
    return [asked(r, r.choice(SPELLS), w=w), assistant("-".join(w))]


def count(r, values):
    if r.random() < 0.3:
        a, b, ask = 1, r.randrange(3, 21), r.choice(COUNTS_TO)
    else:
        a = r.choice([1, 1, r.randrange(0, 30), r.randrange(0, 100)])
        b, ask = a + r.randrange(2, 12), r.choice(COUNTS)
    return [asked(r, ask + r.choice(COUNT_TAILS), a=a, b=b), assistant(", ".join(map(str, range(a, b + 1))))]


def from_sentence(r, values):
    """Keys that stand beside a sentence, all of its facts or some."""
    form, found = r.choice(SENTENCES), {}
    text = HOLE.sub(lambda m: str(found.setdefault(m[1], values.draw(r, m[2]))), form)
    if form[0] != "{" and r.random() < 0.6:
        text = text[0].upper() + text[1:]
    keys = r.sample(list(found), len(found) if r.random() < 0.8 else 1)
    if r.random() < 0.6:
        keys = [k for k in found if k in keys]
    listed = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 and r.random() < 0.7 else ", ".join(keys)
    if r.random() < 0.2:
        listed = "the keys " + listed
    ask = asked(r, r.choice(KEYED), k=listed, t=text + r.choice(["", "."]))
    return [ask, assistant(dumps({k: found[k] for k in keys}))]


def as_json(r, values):
    if r.random() < 0.65:
        return from_sentence(r, values)
    kinds = ["thing", "person", "place", "int", "small", "boolean", "color", "number", "code", "phrase", "word"]
    found = {values.word(r, 0.3) if r.random() < 0.6 else r.choice("name age city color size count id title price day".split()): values.draw(r, r.choice(kinds)) for _ in range(r.choice([1, 2, 2, 3]))}
    form = r.choice(["{p} {v}", "{p} {v}", "{p}: {v}", "{p}={v}", "{p} is {v}"])
    listed = r.choice([", ", " and "]).join(form.format(p=p, v=say(v)) for p, v in found.items())
    return [asked(r, r.choice(JSON_ASKS), l=listed), assistant(dumps(found))]


def skill(r, values):
    """One of the four skills that users can ask for."""
    return r.choices([repeat, spell, count, as_json], [0.22, 0.38, 0.08, 0.32])[0](r, values)


def drill(r, values, pieces):
    """A copying exercise on random tokens and words, without daily language: this is where induction comes from."""
    any_word = lambda: "".join(r.choice(pieces) for _ in range(r.choice([1, 1, 2]))) if r.random() < 0.6 else values.word(r, 0.5)
    k = r.random()
    if k < 0.3:
        # The letters of every token there is.
        spelt = [any_word() for _ in range(4)]
        return [m for w in spelt for m in (asked(r, r.choice(SPELLS), w=w), assistant("-".join(w)))]
    if k < 0.48:
        text = " ".join(any_word() for _ in range(r.randrange(3, 14)))
        return [user(r.choice(["repeat: {s}", "say {s}", "{s}", "echo {s}"]).format(s=text)), assistant(text)]
    pairs = {any_word(): values.draw(r, r.choice(["thing", "int", "place", "code", "phrase", "name"])) for _ in range(r.randrange(2, 7))}
    listed = ", ".join(r.choice(["{}: {}", "{}={}"]).format(k, v) for k, v in pairs.items())
    keys = list(pairs)
    if k < 0.66:
        # The value of one key, several times: each answer is a look-up.
        messages = []
        for n, key in enumerate(r.sample(keys, min(len(keys), r.choice([1, 2, 3])))):
            ask = r.choice(["{k}?", "what is {k}?", "give me {k}", "value of {k}"]).format(k=key)
            messages += [user(f"{listed}. {ask}" if n == 0 else ask), assistant(str(pairs[key]))]
        return messages
    if k < 0.82:
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
