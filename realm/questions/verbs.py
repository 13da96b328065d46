"""Forms of English verbs that are frequent in articles. The rules need them to turn "wrote" into "did ... write".

No question is made from a verb that is not in this table.
"""

from typing import NamedTuple


class Form(NamedTuple):
    """A finite form of a verb other than "be": the base form of the verb, and the form of "do" in a question."""

    base: str
    do: str


_REGULAR = """
abandon abolish accept accompany achieve acquire act adapt add address administer admire adopt advance advise advocate
affect aim allow analyse analyze announce annex appear apply appoint approve argue arrange arrest arrive ascend assassinate
assist associate assume attack attain attempt attend attract author award ban baptise base believe belong besiege border
campaign cancel capture carry carve cause celebrate challenge change charge circumnavigate claim classify climb close
coin collaborate collapse collect colonise colonize combine command commission compare compete compile complete compose
comprise conceive concern conclude conduct connect conquer consider consist consolidate constitute construct consult
contain contest continue contribute control convert convict cover create criticise criticize cross crown culminate
cultivate date debut declare decline decorate dedicate deduce defeat defend define deliver demonstrate denounce depict
deploy depose derive describe design destroy detect determine develop devise devote die differ direct disappear discover
display dissolve distribute diverge divide divorce document domesticate dominate donate draft drain earn edit educate
elect elevate emerge emigrate employ enable encompass encounter encourage end endorse engage enter establish evolve
examine exclude execute exhibit exile exist expand experience explain explore export express extend face fail feature
film finance finish flourish flow focus follow form formulate found function fund gain generate govern graduate grant
happen harness head help host house identify illustrate imprison improve include incorporate increase influence inhabit
inherit initiate inspire install integrate intend intervene introduce invade invent invest investigate involve isolate
issue join kidnap kill label land last launch liberate link list live maintain manage manufacture mark marry master
measure mediate mention merge migrate model modify move murder narrate nominate note observe obtain occupy occur
offer open operate oppose orbit order organise organize originate own paint participate partition pass patent perform
persecute persuade pioneer place plant play popularise popularize portray possess practice practise preach precede
predict premiere present preserve preside prevent proclaim produce promote propose protect prove provide publish pursue
raise rank reach receive recognise recognize recommend record recount reconstruct recover reduce refer reform refuse
regain reign reject relate release remain rename renovate repeat replace report represent require rescue research
resemble resign resist resolve restore result retain retire return reunite reveal revive revolutionise revolutionize rule
sail sample score search secure separate serve settle shape share shift shoot sign simulate solve span specialise
specialize sponsor star start state stem stimulate stretch study succeed suffer suggest support supply suppress surpass
surrender surround survive target tend test time tour trace trade train transform translate transmit transport travel
treat turn underlie unify unite use visit voice vote voyage walk want witness work worship
""".split()

_IRREGULAR = """
arise arose arisen, ban banned banned, become became become, begin began begun, break broke broken, bring brought brought,
build built built, buy bought bought, catch caught caught, choose chose chosen, come came come, control controlled
controlled, deal dealt dealt, draw drew drawn, drive drove driven, fall fell fallen, fight fought fought, find found found,
flee fled fled, fly flew flown, gather gathered gathered, get got got, give gave given, go went gone, grow grew grown, hold
held held, keep kept kept, kidnap kidnapped kidnapped, know knew known, label labelled labelled, lay laid laid, lead led
led, leave left left, lie lay lain, lose lost lost, make made made, mean meant meant, meet met met, model modelled
modelled, occur occurred occurred, oversee oversaw overseen, overthrow overthrew overthrown, overlap overlapped overlapped,
pay paid paid, plan planned planned, put put put, refer referred referred, rise rose risen, run ran run, say said said, see
saw seen, seek sought sought, sell sold sold, send sent sent, set set set, shoot shot shot, show showed shown, sing sang
sung, sink sank sunk, speak spoke spoken, spend spent spent, split split split, spread spread spread, stand stood stood,
star starred starred, steal stole stolen, stem stemmed stemmed, strike struck struck, swim swam swum, take took taken, teach
taught taught, tell told told, think thought thought, throw threw thrown, transmit transmitted transmitted, travel travelled
travelled, undergo underwent undergone, underlie underlay underlain, wear wore worn, win won won, withdraw withdrew
withdrawn, worship worshipped worshipped, write wrote written
"""

BE = frozenset({"is", "are", "was", "were"})
MODALS = frozenset({"can", "could", "may", "might", "must", "should", "would"})
HAVE = {"has": Form("have", "does"), "have": Form("have", "do"), "had": Form("have", "did")}
INTRANSITIVE = frozenset(
    "appear arise arrive ascend become belong come compete consist culminate debut die differ disappear diverge emerge emigrate"
    " evolve exist fall flourish go happen last lie live migrate occur originate participate remain rise stand stem"
    " travel".split()
)
"""Bases of verbs without a passive: "a sport originated in Greece" does not say that the sport was originated."""
_NEVER_FINITE = {
    "based": "base",
    "born": "bear",
    "called": "call",
    "located": "locate",
    "named": "name",
    "situated": "situate",
}
"""Participle -> base. These words look like past forms, but are hardly ever the finite verb of a sentence."""


def _tables() -> tuple[dict[str, Form], dict[str, str], dict[str, str]]:
    irregular = [verb.split() for verb in _IRREGULAR.split(",")]
    known = {base for base, _, _ in irregular}
    regular = [[base, _past(base), _past(base)] for base in _REGULAR if base not in known]
    forms: dict[str, Form] = {}
    for base, past, _ in irregular + regular:
        forms.setdefault(base, Form(base, "do"))
        forms.setdefault(_third(base), Form(base, "does"))
        # The past form replaces an equal base form: "lay" is more often the past of "lie", and "found" that of "find".
        forms[past] = Form(base, "did")
    participles = {participle: base for base, _, participle in reversed(irregular + regular)}
    return forms, participles | _NEVER_FINITE, {base: past for base, past, _ in irregular + regular}


def _third(base: str) -> str:
    if base.endswith(("s", "sh", "ch", "x", "z", "o")):
        return base + "es"
    return base[:-1] + "ies" if base[-1] == "y" and base[-2] not in "aeiou" else base + "s"


def _past(base: str) -> str:
    if base.endswith("e"):
        return base + "d"
    return base[:-1] + "ied" if base[-1] == "y" and base[-2] not in "aeiou" else base + "ed"


FORMS, PARTICIPLES, PAST = _tables()
"""Finite form -> base and "do" (wrote -> write, did; borders -> border, does); participle -> base; base -> past form."""
