"""Values and words for documents about copying: real words, names, and invented ones."""

import re
import string
from collections import Counter

from grammar import expand

PLACES = """Paris London Berlin Madrid Rome Vienna Prague Lisbon Tokyo Cairo Delhi Boston Chicago Dublin Athens Warsaw
Budapest Copenhagen Stockholm Geneva Brussels Hamburg Munich Cologne Naples Venice Florence Marseille Porto Valencia
Kyiv Tallinn Riga Vilnius Sofia Belgrade Zagreb Sarajevo Ankara Izmir Tbilisi Tehran Baghdad Amman Doha Mumbai Chennai
Kolkata Dhaka Bangkok Hanoi Jakarta Singapore Seoul Osaka Sapporo Sydney Perth Auckland Honolulu Seattle Denver Dallas
Austin Phoenix Detroit Atlanta Miami Montreal Calgary Ottawa Bogota Quito Santiago Montevideo Havana Lagos Accra Dakar
Tunis Algiers Kampala Harare Durban Leeds York Bath Bristol Cardiff Glasgow Reykjavik Malmo Tampere Aarhus Ghent Basel
Bern Linz Graz Verona Pisa Turin Nice Lyon Nantes Bilbao Granada Cork Galway""".split()
PEOPLE = """Anna Tom Maria Peter Lucy John Sara Paul Emma Max Julia David Laura Simon Nina Oliver Sophie Martin Clara
Felix Hannah Jonas Elena Marco Lena Daniel Rosa Carlos Ines Pedro Amina Omar Leila Yusuf Mei Chen Wei Yuki Hiro Priya
Arjun Deepa Ivan Katya Boris Natasha Sven Astrid Lars Freya Magnus Bridget Sean Fiona Duncan Morag Gwen Rhys Aisha Kofi
Ama Jabari Zola Diego Camila Mateo Valentina Bruno Giulia Luca Pierre Camille Antoine Greta Otto Frieda Hans Walter
Edith Harold Mabel Stanley Agnes Ruth Naomi Esther Caleb Joshua""".split()
SURNAMES = """Smith Jones Miller Brown Wilson Taylor Clark Walker Young King Wright Hill Green Adams Baker Carter Turner
Parker Collins Morris Rogers Reed Cook Bell Cooper Ward Gray Watson Brooks Price Bennett Wood Ross Powell Long Foster
Kowalski Novak Horvath Silva Costa Rossi Ferrari Schmidt Weber Fischer Larsen Berg Nakamura Tanaka Singh Patel Khan
Ali Hassan Okafor Mensah Nguyen Tran Kim Park Lee Wong""".split()
THINGS = """apple bread cheese garlic lemon onion pepper potato rice salad soup tomato carrot basil honey butter sugar
chair table lamp mirror carpet shelf drawer basket bottle bucket ladder hammer needle rope candle pencil paper scissors
stapler printer keyboard monitor tablet phone charger cable helmet bicycle scooter tractor wagon boat anchor compass
tent blanket pillow towel soap brush comb button zipper jacket sweater boots gloves scarf umbrella wallet ring watch
guitar violin drum piano flute trumpet camera tripod lens balloon kite puzzle marble doll robot rocket dragon castle
bridge tower garden fence gate window roof chimney cellar attic kitchen garage balcony forest river lake mountain island
desert cloud thunder snow frost sunset tiger lion rabbit turtle eagle sparrow salmon spider beetle horse donkey goat
front back side main upper lower left right north south east west old new spare blue history physics marketing sales
painter driver nurse gardener plumber music chess football tennis travel coffee espresso noodle curry mushroom pumpkin
olive ham spinach salami winter summer autumn spring harvest market factory engine gear piston valve filter""".split()
ADJECTIVES = """big small red green yellow white black quiet loud happy sad early late long short cold warm soft hard
broken empty full clean dirty rough gentle hidden golden silver wooden plastic sharp round flat heavy light""".split()
VERBS = """buy call bring read clean pack wash fix paint visit meet check water feed send return renew cancel print sign
order cook bake plant move sell lend find close open start finish plan write draw learn practise watch""".split()
ROOMS = """kitchen bathroom bedroom cellar attic garage hallway office nursery pantry balcony lounge study library
conservatory laundry den lobby porch workshop""".split()
LANGUAGES = """German French Spanish Italian Dutch Polish Czech Swedish Danish Finnish Greek Turkish Arabic Hindi
Japanese Korean Chinese Russian Portuguese Welsh Irish Basque Latin Swahili Thai""".split()
CURRENCIES = "EUR USD GBP CHF JPY SEK NOK DKK PLN CZK INR CNY AUD CAD NZD euros dollars pounds francs yen crowns".split()
COLORS = "red blue green yellow orange purple white pink brown grey teal crimson amber navy olive beige".split()
COMMANDS = ["ls -la", "git status", "df -h", "make test", "uptime", "cargo build", "whoami", "date", "ps aux", "pwd"]
ENDINGS = "txt csv md pdf json log png jpg toml yaml rs py html".split()

SENTENCES = """the {thing} is in the {room}|{person} comes at {time}|I am late, start without me|the {thing} leaves at {time}|we need {small} more {thing}
{person} has lost the {thing}|see you on {date}|the {adjective} {thing} belongs to {person}|my {thing} is {adjective}|never {verb} a {adjective} {thing}|there are {small} of us
dinner is ready|the key to the {room} is with {person}|it is too {adjective} in {place}|{person} and {person} are on their way|bring {thing} and {thing}|no {thing} today
I left the {thing} at home|do not forget the {thing}|{thing} is better than {thing}|{small} {adjective} things under a {thing}|please {verb} the {thing} for {person}
we meet in {place} on {date}|the meeting is moved to {time}|good luck with the {thing}|happy birthday, {person}|{person} said no|all is well in {place}|the {room} smells of {thing}
thank you for the {thing}|I will be there in {small} minutes|the {thing} costs {int}|nobody knows where {person} is|one {thing}, two {thing}|yes, I have seen the {thing}
{place} is far from {place}|who has taken my {thing}?|what a {adjective} day|is the {thing} still there?|a {adjective} {thing} in {place}|{color} {thing} on {color} paper""".replace("\n", "|").split("|")

ONSETS = "b c d f g h j k l m n p qu r s t v w x y z br ch cl cr dr fl gr pl pr sh sk sl st str th tr".split()
NUCLEI = "a e i o u ai ea ee io ou".split()
CODAS = ["", "", "", "n", "r", "s", "l", "t", "m", "x", "nd", "rk", "st"]


def invented(r):
    """A word that no text has: syllables, or now and then any letters."""
    if r.random() < 0.15:
        return "".join(r.choice(string.ascii_lowercase) for _ in range(r.randrange(3, 8)))
    return "".join(r.choice(ONSETS) + r.choice(NUCLEI) for _ in range(r.choice([1, 2, 2, 2, 3]))) + r.choice(CODAS)


class Values:
    """Draws values by kind; words that the tests hold out are left out of the lists. `texts` are phrases of daily
    language: their rarer words and they themselves are values too."""

    def __init__(self, held, texts):
        keep = lambda words: [w for w in words if w.lower() not in held]
        self.places, self.people, self.surnames = keep(PLACES), keep(PEOPLE), keep(SURNAMES)
        self.things, self.rooms, self.adjectives, self.verbs = keep(THINGS), keep(ROOMS), keep(ADJECTIVES), keep(VERBS)
        self.texts = [t for t in texts if "<" not in t]
        counts = Counter(w for t in self.texts for w in re.findall(r"[a-z]{3,}", t.lower()))
        self.daily = keep(w for w in sorted(counts) if counts[w] < 12)

    def word(self, r, invent=0.4):
        """A noun, another word of daily language, or an invented one."""
        return invented(r) if r.random() < invent else r.choice(self.things if r.random() < 0.4 else self.daily)

    def sentence(self, r):
        """A whole sentence, with capital and full stop or without."""
        if r.random() < 0.4:
            text = expand(r, r.choice(self.texts), {})
        else:
            text = re.sub(r"\{(\w+)\}", lambda m: str(self.draw(r, m[1])), r.choice(SENTENCES))
        if r.random() < 0.4:
            text = text[:1].upper() + text[1:]
        return text + "." if text[-1] not in "?!." and r.random() < 0.25 else text

    def draw(self, r, kind):
        """One value of a kind, `enum a,b,c` included."""
        if kind.startswith("enum "):
            return r.choice(kind[5:].split(","))
        return getattr(self, kind)(r)

    def place(self, r):
        k = r.random()
        if k < 0.5:
            return r.choice(self.places)
        if k < 0.85:
            return (invented(r) if r.random() < 0.7 else self.word(r, 0)).capitalize()
        return r.choice(["New", "Port", "San", "Bad", "Upper", "North", "Saint"]) + " " + invented(r).capitalize()

    def person(self, r):
        first = r.choice(self.people) if r.random() < 0.6 else (invented(r) if r.random() < 0.7 else self.word(r, 0)).capitalize()
        if r.random() < 0.7:
            return first
        if r.random() < 0.15:
            return r.choice(["Dr ", "Mr ", "Mrs ", "Aunt ", "Uncle "]) + first
        return first + " " + (r.choice(self.surnames) if r.random() < 0.6 else invented(r).capitalize())

    def name(self, r):
        k = r.random()
        if k < 0.3:
            return invented(r).capitalize()
        if k < 0.5:
            return invented(r).capitalize() + " " + invented(r).capitalize()
        if k < 0.65:
            return r.choice(["", "", "The "]) + self.word(r, 0).capitalize()
        if k < 0.85:
            return r.choice(["", "The ", "Cafe "]) + self.adjective(r).capitalize() + " " + self.thing(r).capitalize()
        return self.place(r) + r.choice([" Street", " Inn", " Square", " House", " FC", ""])

    def adjective(self, r):
        return r.choice(self.adjectives)

    def verb(self, r):
        return r.choice(self.verbs)

    def thing(self, r):
        return self.word(r, 0.3)

    def phrase(self, r):
        k = r.random()
        if k < 0.3:
            return r.choice(self.verbs) + " " + r.choice(["the ", "a ", ""]) + self.thing(r)
        if k < 0.5:
            return self.adjective(r) + " " + self.thing(r)
        if k < 0.65:
            return self.thing(r) + " " + r.choice(["and", "for", "with", "in", "of"]) + " " + self.thing(r)
        if k < 0.8:
            return " ".join(self.thing(r) for _ in range(r.choice([1, 2, 3, 4])))
        if k < 0.93:
            return self.sentence(r).rstrip(".")
        text = self.adjective(r) + " " + self.thing(r)
        return text.title()

    def room(self, r):
        return r.choice(self.rooms) if r.random() < 0.8 else self.thing(r)

    def language(self, r):
        return r.choice(LANGUAGES) if r.random() < 0.8 else invented(r).capitalize()

    def currency(self, r):
        return r.choice(CURRENCIES)

    def color(self, r):
        return r.choice(COLORS) if r.random() < 0.8 else invented(r)

    def small(self, r):
        return r.randrange(2, 31)

    def digit(self, r):
        return r.randrange(1, 6)

    def int(self, r):
        return r.randrange(10 ** r.choice([1, 2, 2, 3, 3, 4, 5]))

    def number(self, r):
        return r.choice([r.randrange(1, 500), round(r.random() * 10 ** r.choice([1, 2, 3]), r.choice([1, 2]))])

    def boolean(self, r):
        return r.random() < 0.5

    def date(self, r):
        days = "monday tuesday wednesday thursday friday saturday sunday tomorrow today".split()
        months = "January February March April May June July August September October November December".split()
        k = r.random()
        if k < 0.5:
            return f"{r.randrange(2020, 2034)}-{r.randrange(1, 13):02}-{r.randrange(1, 29):02}"
        if k < 0.75:
            day = r.choice(days)
            return day.capitalize() if r.random() < 0.4 else day
        return r.choice([f"{r.randrange(1, 29)} {r.choice(months)}", f"{r.choice(months)} {r.randrange(1, 29)}"])

    def time(self, r):
        hour = r.randrange(24)
        return r.choice([f"{hour}:{r.randrange(60):02}", f"{hour:02}:{r.randrange(60):02}", f"{hour % 12 + 1} {r.choice(['am', 'pm'])}",
                         f"{hour % 12 + 1}{r.choice(['am', 'pm'])}"])

    def code(self, r):
        letters = "".join(r.choice(string.ascii_uppercase) for _ in range(r.randrange(1, 4)))
        digits = str(r.randrange(10 ** r.randrange(1, 5)))
        k = r.random()
        if k < 0.08:
            return letters + "".join(r.choice(string.digits + string.ascii_uppercase) for _ in range(r.randrange(5, 14)))
        if k < 0.2:
            return self.word(r) + r.choice(["", "-", "_"]) + digits
        return letters + r.choice(["", "-", "-"]) + digits

    def ticker(self, r):
        return "".join(r.choice(string.ascii_uppercase) for _ in range(r.randrange(2, 5)))

    def phone(self, r):
        digits = "".join(r.choice(string.digits) for _ in range(r.randrange(5, 10)))
        return r.choice([digits, digits[:3] + "-" + digits[3:], "+" + digits])

    def email(self, r):
        user = (self.person(r).split()[0] if r.random() < 0.5 else invented(r)).lower()
        return f"{user}@{invented(r)}.{r.choice(['com', 'org', 'net', 'example'])}"

    def slug(self, r):
        text = r.choice(["-", "_", ""]).join(self.word(r) for _ in range(r.choice([1, 1, 2])))
        return text + (str(r.randrange(1, 3000)) if r.random() < 0.2 else "")

    def file(self, r):
        stem = f"{r.choice(['IMG', 'DSC', 'scan', 'page'])}_{r.randrange(10000):04}" if r.random() < 0.1 else self.slug(r)
        folder = self.dir(r) + "/" if r.random() < 0.25 else ""
        return f"{folder}{stem}.{r.choice(ENDINGS)}"

    def dir(self, r):
        return r.choice(["/", "./", "", "~/"]) + "/".join(self.word(r) for _ in range(r.choice([1, 1, 2])))

    def version(self, r):
        return r.choice(["", "v"]) + ".".join(str(r.randrange(20)) for _ in range(r.choice([2, 3])))

    def host(self, r):
        return r.choice([f"{invented(r)}.{r.choice(['com', 'org', 'local', 'net'])}", ".".join(str(r.randrange(256)) for _ in range(4))])

    def shell(self, r):
        return r.choice(COMMANDS) if r.random() < 0.4 else f"{invented(r)} {r.choice(['-a', '--all', '-v', '-n 3'])} {self.word(r)}"

    def equation(self, r):
        return f"{r.randrange(2, 20)}x {r.choice('+-')} {r.randrange(1, 50)} = {r.randrange(1, 200)}"
