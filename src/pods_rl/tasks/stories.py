"""The English of the task `words`: names, things, and the sentences of its stories.

Fields of a sentence: `{A}` is the person of the story; `{He}`, `{His}`, `{he}`, `{his}`, `{him}` stand for that person;
`{B}` is another person, of the other sex; `{things}` are counted; `{n}` is a number, `{times}` one such as `twice`. The
first pronoun of a sentence becomes the name if the sentence before has another subject.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

SHE = ["Mia", "Anna", "Lena", "Sara", "Julia", "Nora", "Emma", "Ruth", "Clara", "Alice", "Grace", "Maria"]
HE = ["Ben", "Tom", "Paul", "Omar", "Leo", "Max", "David", "Peter", "Sam", "Jack", "Daniel", "Adam"]
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
_PRONOUN = re.compile(r"\{(He|he|him|His|his)\}")


@dataclass(frozen=True)
class Scene:
    """What a story is about: its things, and sentences that set it, open it, add things and take things away.

    `groups` open a story with `{k}` groups of `{n}` things each.
    """

    things: tuple[str, ...]
    settings: tuple[str, ...]
    opens: tuple[str, ...]
    groups: tuple[str, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]


def _scene(things: str, *tables: str) -> Scene:
    """Make a scene of its things and of tables with a sentence a line, in the order of its fields."""
    return Scene(tuple(things.split()), *(tuple(line.strip() for line in table.splitlines()) for table in tables))


SCENES = (
    _scene(
        "marbles stickers stamps shells badges",
        """It is the first day of the holidays, and {A} is tidying up at home.
        Every Sunday {A} likes to look at an old collection.
        {A} has loved collecting small things for many years.""",
        """{A} has {n} {things} in a tin under the bed.
        In the collection of {A} there are {n} {things}.
        {A} owns {n} {things} and keeps them in a wooden chest.""",
        """{A} has {k} bags with {n} {things} in each bag.
        {A} keeps the {things} in {k} jars, and each jar holds {n} of them.""",
        """{His} grandfather gives {him} {n} more {things}.
        {He} finds {n} {things} at the back of a drawer.
        {He} wins {n} {things} in a game against {B}.
        At the market {he} buys another {n} {things}.
        For {his} birthday {he} gets {n} new {things} from {B}.""",
        """{He} gives {n} {things} to {B}.
        {He} loses {n} of the {things} on the way to school.
        {He} trades {n} {things} for a comic book.
        {He} throws away {n} {things} that are broken.
        {He} lets {B} take {n} of {his} {things}.""",
    ),
    _scene(
        "cookies muffins rolls cupcakes pies",
        """There is a party at the school of {A} tomorrow.
        {A} gets up early to bake for the whole street.
        The kitchen of {A} smells of sugar and butter.""",
        """{A} bakes {n} {things} in the morning.
        There are already {n} {things} on the table in front of {A}.
        {A} takes {n} {things} out of the oven.""",
        """{A} bakes {k} trays of {things}, with {n} on each tray.
        {A} fills {k} plates and puts {n} {things} on each of them.""",
        """After lunch {he} bakes {n} more {things}.
        {His} aunt brings another {n} {things}.
        {B} comes to help and makes {n} {things} as well.
        {He} finds {n} frozen {things} and adds them to the others.
        A second batch gives {him} {n} extra {things}.""",
        """{His} family eats {n} of the {things}.
        {He} burns {n} {things} and has to throw them out.
        {He} drops {n} {things} on the floor, and the dog eats them.
        {B} comes by and buys {n} {things}.
        {He} sends {n} {things} to {his} teacher.""",
    ),
    _scene(
        "apples pears plums lemons peaches",
        """The sun is shining, and {A} is working in the orchard.
        It has been a good year for fruit, and {A} is happy.
        {A} spends the weekend on a farm in the hills.""",
        """{A} picks {n} {things} before breakfast.
        {A} starts the day with {n} {things} in a big basket.
        In the cart of {A} there are {n} {things}.""",
        """From each of {k} trees {A} picks {n} {things}.
        {A} fills {k} buckets with {n} {things} each.""",
        """{He} climbs a ladder and picks {n} more {things}.
        {He} picks up {n} {things} that fell into the grass.
        {B} hands {him} another {n} {things}.
        {His} neighbor brings over {n} {things}.
        From the last tree {he} gets {n} extra {things}.""",
        """{He} sells {n} {things} at the gate.
        {He} uses {n} of the {things} to make jam.
        The birds spoil {n} of the {things}.
        {He} gives {n} {things} to the children next door.
        {B} is hungry and eats {n} {things}.""",
    ),
    _scene(
        "carrots tomatoes pumpkins potatoes onions",
        """{A} has a small garden behind the house.
        After a week of rain, everything in the garden of {A} is growing fast.
        {A} wants to bring vegetables to the fair.""",
        """{A} digs up {n} {things} on Monday.
        {A} harvests {n} {things} from the first bed.
        There are {n} {things} in the shed of {A}.""",
        """{A} has {k} rows of {things}, with {n} in each row.
        {A} harvests {k} beds and gets {n} {things} from each bed.""",
        """On Tuesday {he} harvests {n} more {things}.
        {He} trades some herbs for {n} {things}.
        {B} leaves another {n} {things} at the door.
        {His} cousin gives {him} {n} {things}.
        Behind the fence {he} discovers {n} extra {things}.""",
        """A rabbit eats {n} of the {things}.
        {He} cooks {n} {things} for dinner.
        {He} gives {n} {things} to {B}.
        The frost ruins {n} of the {things}.
        {He} puts {n} {things} into a soup.""",
    ),
    _scene(
        "roses tulips lilies daisies sunflowers",
        """{A} works in a flower shop near the station.
        It is the week before a wedding, and {A} is very busy.
        {A} wants to decorate the town hall.""",
        """When the shop opens, {A} has {n} {things}.
        {A} counts {n} {things} in the shop window.
        {A} cuts {n} {things} in the early morning.""",
        """{A} has {k} vases with {n} {things} in each vase.
        {A} ties {k} bunches and uses {n} {things} for each bunch.""",
        """A truck delivers {n} more {things} to {him}.
        {He} orders another {n} {things}, and they arrive at noon.
        {B} brings {him} {n} {things} from the garden.
        {He} cuts {n} extra {things} in the greenhouse.
        {He} buys {n} {things} from a farmer.""",
        """A customer buys {n} of the {things}.
        {He} throws out {n} {things} that have dried up.
        {He} puts {n} {things} on the tables of a restaurant.
        {B} takes {n} {things} home.
        {He} donates {n} {things} to the hospital.""",
    ),
    _scene(
        "pencils crayons erasers markers notebooks",
        """A new school year begins, and {A} is getting ready.
        {A} helps the teacher after class.
        The art club of {A} meets every Friday.""",
        """{A} has {n} {things} in a drawer.
        On the desk of {A} there are {n} {things}.
        {A} counts {n} {things} in the cupboard.""",
        """{A} opens {k} boxes and finds {n} {things} in each box.
        {A} buys {k} packs of {things}, with {n} in each pack.""",
        """{His} teacher hands {him} {n} more {things}.
        {He} finds {n} {things} under the chairs.
        {B} returns {n} {things} that belong to {him}.
        The school gives {him} another {n} {things}.
        {He} buys {n} extra {things} at the store.""",
        """{He} lends {n} {things} to {B}.
        {He} uses up {n} of the {things}.
        {He} loses {n} {things} during the week.
        {He} leaves {n} {things} on the bus.
        {B} borrows {n} of the {things}.""",
    ),
    _scene(
        "novels comics magazines puzzles maps",
        """{A} is moving to a new house.
        On rainy days {A} likes to stay inside and read.
        {A} runs a small library for the village.""",
        """{A} has {n} {things} on a shelf.
        There are {n} {things} in the study of {A}.
        {A} begins the month with {n} {things}.""",
        """{A} has {k} shelves with {n} {things} on each shelf.
        {A} packs {k} boxes and puts {n} {things} into each box.""",
        """{His} uncle sends {him} {n} more {things}.
        {He} finds {n} {things} in the attic.
        {B} donates {n} {things} to {him}.
        At a sale {he} gets another {n} {things}.
        {He} orders {n} extra {things} in town.""",
        """{He} lends {n} {things} to {B}.
        {He} sells {n} of the {things} online.
        Water from the roof ruins {n} of the {things}.
        {He} gives away {n} {things}.
        {B} borrows {n} {things} and never brings them back.""",
    ),
    _scene(
        "candles necklaces kites lanterns baskets",
        """{A} makes gifts by hand and sells them in winter.
        {A} has a little workshop by the river.
        The winter market starts soon, and {A} has a lot to do.""",
        """{A} has made {n} {things} so far.
        {A} brings {n} {things} to the market.
        On the bench of {A} there are {n} {things}.""",
        """{A} works for {k} days and makes {n} {things} each day.
        {A} carries {k} crates with {n} {things} in each crate.""",
        """In the evening {he} makes {n} more {things}.
        {B} helps and makes {n} {things} too.
        {His} mother gives {him} another {n} {things}.
        {He} repairs {n} old {things} and adds them.
        {He} finishes {n} extra {things} before the weekend.""",
        """{He} sells {n} of the {things} to tourists.
        {He} gives {n} {things} to {B}.
        The rain ruins {n} of the {things}.
        {He} keeps {n} {things} for {his} parents and takes them home.
        Somebody steals {n} of the {things}.""",
    ),
)

GROWTHS = (
    "By the end of the week {he} has {times} as many {things} as before.",
    "After some time {he} has {times} as many {things} as that.",
    "Later that month the number of {things} is {times} as large.",
)
HALVINGS = (
    "{He} gives half of the {things} to {B}.",
    "{He} keeps only half of the {things}.",
    "Then half of the {things} go to {B}.",
)
# the end of a story, by what it asks for
ENDS = {
    "ask": (
        "How many {things} does {A} have now?",
        "How many {things} does {A} have in the end?",
        "At the end of all this, how many {things} does {A} have?",
    ),
    "share": (
        "{He} divides the {things} equally among {n} friends. How many {things} does each friend get?",
        "{He} packs all the {things} into {n} bags, the same number in each. How many {things} are in one bag?",
        "A group of {n} children shares the {things} equally. How many {things} does each child get?",
    ),
    "price": (
        "{He} sells all of the {things} for ${n} each. How many dollars does {he} earn?",
        "If all of the {things} are sold at a price of ${n} each, how many dollars does {A} get?",
    ),
    "more": (
        "{B} has {n} more {things} than {A} has now. How many {things} does {B} have?",
        "Now {A} has {n} fewer {things} than {B}. How many {things} does {B} have?",
    ),
    "fewer": (
        "{B} has {n} fewer {things} than {A} has now. How many {things} does {B} have?",
        "Now {A} has {n} more {things} than {B}. How many {things} does {B} have?",
    ),
    "times": (
        "{B} has {times} as many {things} as {A} has now. How many {things} does {B} have?",
        "{A} has a plan: next year there will be {times} as many {things}. How many {things} will that be?",
    ),
    "together": (
        "{B} has {n} {things}. How many {things} do {A} and {B} have together?",
        "{A} and {B} put their {things} together, and {B} brings {n}. How many {things} is that?",
    ),
}
# sentences with a number that has nothing to do with the question
DISTRACTORS = (
    "{His} sister, who is {n} years old, watches for a while.",
    "{He} takes a break of {n} minutes.",
    "{He} listens to the radio for {n} minutes.",
    "It is {n} degrees outside.",
    "{His} phone has {n} percent of its battery left.",
    "{His} favorite jacket cost ${n}.",
    "{B} calls and talks for {n} minutes.",
    "{B} lives {n} miles away.",
    "{B} is {n} years old today.",
    "{B} has {n} cousins.",
    "{B} has read {n} pages of a long book.",
    "A train with {n} cars passes by.",
    "The walk home takes {n} minutes.",
    "There are {n} houses in the street.",
    "{His} neighbor keeps {n} chickens.",
    "The old clock on the wall cost ${n}.",
)


def write_story(rng: random.Random, scene: Scene, told: list[tuple[str, int]], groups: int) -> str:
    """Write sentences, each with its number, as one text about one person and one kind of things.

    `groups` is the number of groups, if the story opens with groups.
    """
    own, others = (SHE, HE) if rng.random() < 0.5 else (HE, SHE)
    he, his, him = ("she", "her", "her") if own is SHE else ("he", "his", "him")
    name, friends = rng.choice(own), rng.sample(others, 2)
    fields = {"A": name, "He": he.title(), "His": his.title(), "he": he, "his": his, "him": him, "k": groups}
    fields["things"] = rng.choice(scene.things)
    text, subject = [], False
    for sentence, number in told:
        if not subject:  # a pronoun would be unclear
            sentence = _PRONOUN.sub(lambda found: "{A}'s" if found[1].lower() == "his" else "{A}", sentence, count=1)
        subject = sentence.startswith(("{He}", "{A} "))
        text.append(sentence.format(**fields, n=number, times=TIMES.get(number), B=rng.choice(friends)))
    return " ".join(text)
