"""Questions about the rest of the world, put together from any words: that a noun is strange is what a refusal must rest on."""

import re

FRAMES = """
who is {person}?|who was {person}?|how old is {person}?|what did {person} do in {int}?|did {person} win?|is {person} married?|where does {person} live?
where is {place}?|how far is {place} from {place}?|what is the capital of {place}?|tell me about {place}|how many people live in {place}?|is {place} safe?
what language do they speak in {place}?|best time to visit {place}|cheap hotels in {place}|flights to {place}|what's the weather in {place}?|time in {place}
history of {place}|a good restaurant in {place}|trains from {place} to {place}|do I need a visa for {place}?|how hot is it in {place} in summer?
what is a {thing}?|what is {adjective} {thing}?|how do I {verb} a {thing}?|how do I {verb} my {adjective} {thing}?|my {thing} is {adjective}, what now?
how much does a {thing} cost?|where can I buy a {thing}?|is {thing} healthy?|recipe for {thing} with {thing}|how long does {thing} last?|{thing} or {thing}?
which {thing} is best?|best {thing} for {thing}|how is {thing} made?|who invented the {thing}?|can I {verb} a {thing} with a {thing}?|difference between {thing} and {thing}
why is my {thing} so {adjective}?|what color is a {thing}?|how heavy is a {thing}?|is a {thing} bigger than a {thing}?|do I have to {verb} the {thing} every day?
can you {verb} my {thing}?|{verb} the {thing}|please {verb} the {adjective} {thing}|I want to {verb} a {thing}|I need to {verb} my {thing}|help me {verb} the {thing}
how to {verb} {thing}|what do I need to {verb} a {thing}?|is it possible to {verb} a {adjective} {thing}?|tips for {thing}|{adjective} {thing}?|{thing} {thing}
write a poem about {thing}|tell me a story about a {adjective} {thing}|write an essay on {thing}|a joke about {thing}|a song about {place}|draw a {thing}
translate {thing} into {language}|what is {thing} in {language}?|how do you say {phrase} in {language}?|learn {language}|is {language} hard?
what is {number} times {int}?|what's {int} + {int}?|{int} minus {int}|square root of {int}|convert {number} {currency} to {currency}|is {int} a prime?
what happened on {date}?|what day is {date}?|who won the {thing} in {int}?|who wrote {name}?|when does {name} open?|is {name} any good?|plot of {name}
what is {name}?|who founded {name}?|what does {name} sell?|score of {name}|news about {name}|stock of {name}|who plays in {name}?
how do {thing}s sleep?|why do {thing}s {verb}?|what eats a {thing}?|how many legs has a {thing}?|how fast is a {thing}?|where do {thing}s live?
should I {verb} the {thing} or the {thing}?|what goes with {thing}?|how do I get {thing} out of a {thing}?|my {thing} does not {verb}|the {thing} broke
what should I wear to {name}?|gift ideas for {person}|what to cook with {thing} and {thing}|I feel {adjective}|why are {thing}s {color}?|paint a {thing} {color}
write a function that can {verb} a {thing}|code to {verb} {thing}s|sort {thing}s in python|regex for a {thing}|sql to find {thing}s|explain {thing} physics
""".strip().replace("\n", "|").split("|")
HOLE = re.compile(r"\{(\w+)\}")


def question(r, values):
    return HOLE.sub(lambda m: str(values.draw(r, m[1])), r.choice(FRAMES))
