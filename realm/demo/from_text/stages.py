"""The demo of one corpus: which commands, in which order, and what each makes.

Stages come one at a time, because some are known only when those before them are done: an index is named after the model
that made it, and the control with equal time needs the time that pre-training took.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realm.demo.runner import Section, Stage
from realm.errors import InputError
from realm.model.folder import last_record, read_manifest
from realm.store.vectors import folder_of

Control = Literal["ict-same-seconds", "shuffled", "entity"]


@dataclass(frozen=True)
class FromTextConfig:
    """What the demo from plain text does; how each stage does it is in the stage's own table of the same file."""

    corpora: tuple[str, ...] = ("package:vital-articles",)
    """Sources; each gets a knowledge base and a demo of its own."""
    encoder: str = "package:realm-mini"
    """Where every model starts, and whose tokenizer cuts the text."""
    seeds: tuple[int, ...] = (0,)
    """Of ICT, pre-training and the controls; the first one's model is fine-tuned."""
    controls: tuple[Control, ...] = ()
    """What REALM is compared with beside its own start."""
    ask: tuple[str, ...] = ()
    """Questions to answer at the end; none: five of the dev questions."""
    fill: str = "The [MASK] is the currency of the United Kingdom."
    """The sentence that `realm fill` completes at the end."""

    def __post_init__(self) -> None:
        for name in ("corpora", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: the demo needs at least one")


CORPUS = Section(
    "1. A knowledge base",
    "Documents are cut at sentence ends into passages, and names and dates are marked in them: the facts to be hidden later.\n"
    "Questions are made from the same text by rules, some to fine-tune with, the others (dev) to measure with.",
)
ENCODER = Section(
    "2. The encoder",
    "The language model that all others start from (package:realm-mini read plain text only: no questions, no labels).\n"
    "Its embedder turns text into a vector; as it is now, before any training of its own, it is the start to beat.",
)
ICT = Section(
    "3. A warm start: the inverse cloze task",
    "The embedder learns to find the passage that a sentence was cut from.\n"
    "Then `realm index` embeds every passage, so that the best ones for a query can be found.",
)
PRETRAIN = Section(
    "4. REALM pre-training",
    "A name or date is hidden in a sentence, passages are retrieved, and the reader fills the gap with their help.\n"
    "Passages that helped will score higher next time; the index is rebuilt in the background while training goes on,\n"
    "and the last one, of the model that is saved, stays in the knowledge base.",
)
CONTROLS = Section(
    "4b. The controls",
    "What else could explain a gain? More of the warm start, for the seconds that REALM had; a reader whose verdicts are\n"
    "shuffled among the passages; or passages that get credit for holding the hidden words, with no reader at all.",
)
FINETUNE = Section(
    "5. Fine-tuning",
    "From the made questions the reader learns to point at the answer in the best passages, and the embedder to find them.\n"
    "The dev questions are about other documents; the model that answers most of them is kept.",
)
MEASURE = Section(
    "6. What each retriever finds",
    "Masked facts: sentences held out of all training with a name or date hidden; found when another passage has it.\n"
    "Questions: found when a passage has the answer. Each retriever is asked the same ones.",
)
ANSWER = Section(
    "7. Answers with evidence",
    "[[ ]] marks the answer in its passage. p(z|x) is the share of its trust that the retriever gives to the passage,\n"
    "p(y|z,x) what the reader makes of it.",
)


@dataclass(frozen=True)
class DemoRun:
    """One corpus and the folder where all about it is."""

    config: FromTextConfig
    preset: str
    """The configuration file, or preset by name, of every stage."""
    source: str
    folder: Path
    question_files: tuple[Path, ...] = ()
    """Measured beside the made dev questions."""

    @property
    def kb(self) -> Path:
        return self.folder / "kb"

    @property
    def dev(self) -> Path:
        return self.folder / "questions" / "dev.jsonl"

    @property
    def curves(self) -> Path:
        return self.folder / "curves.png"

    def model(self, name: str, seed: int | None = None) -> Path:
        """A model's folder; those of seeds beyond the first carry it in their name."""
        first = seed is None or seed == self.config.seeds[0]
        return self.folder / "models" / (name if first else f"{name}-{seed}")

    def outcome(self, model: str, test: str) -> Path:
        """Where the report on a model in one of the `tests` is, with each query's outcome."""
        return self.folder / "reports" / f"{model}.{test}.json"

    def retrievers(self) -> dict[str, list[str]]:
        """What the table compares -> the names of its models, one for each seed it was trained with."""
        trained = {
            name: [self.model(name, seed).name for seed in self.config.seeds]
            for name in ("ict", "realm", *self.config.controls)
        }
        return {"bm25": ["bm25"], "encoder": ["encoder"], **trained}

    def tests(self) -> dict[str, Path | None]:
        """What each retriever is measured on -> its question file; the probe has none.

        Raises:
            InputError: two question files have the same name, in folders of the same name.
        """
        named: dict[str, Path | None] = {"probe": None, "dev": self.dev}
        stems = [*named, *(file.stem for file in self.question_files)]
        for file in self.question_files:
            alone = stems.count(file.stem) == 1
            name = file.stem if alone else f"{file.resolve().parent.name}-{file.stem}"
            if name in named:
                raise InputError(
                    f"two question files would be called {name}, {file} is the second: rename it"
                )
            named[name] = file
        return named

    # -- the commands ---------------------------------------------------------------------------------------------

    def making(self) -> Iterator[Stage]:
        """Stages 1 to 5: from text to models."""
        kb, encoder, train = self.kb, self.model("encoder"), self.dev.with_name("train.jsonl")
        first, *_ = self.config.seeds
        build = self._command("kb build", self.source, out=kb, tokenizer=self.config.encoder)
        yield Stage(CORPUS, "kb build", build, kb)
        yield Stage(CORPUS, "questions", self._command("questions", kb=kb, out=self.dev.parent), self.dev)
        mlm = self._command("mlm", kb=kb, init=self.config.encoder, out=encoder)
        yield Stage(ENCODER, "mlm", mlm, encoder)
        yield self._index(ENCODER, encoder)
        for seed in self.config.seeds:
            ict = self.model("ict", seed)
            yield self._train(ICT, "ict", ict, seed, kb=kb, init=encoder)
            yield self._index(ICT, ict)
        for seed in self.config.seeds:
            yield self._pretrain(PRETRAIN, "realm", seed)
        for seed in self.config.seeds:
            for control in self.config.controls:
                if control == "ict-same-seconds":
                    yield from self._longer_ict(seed)
                else:
                    yield self._pretrain(CONTROLS, control, seed, f"signal={control}")
        start, qa = self.model("realm"), self.model("qa")
        yield self._train(FINETUNE, "finetune", qa, first, kb=kb, model=start, train=train, dev=self.dev)

    def measuring(self) -> Iterator[Stage]:
        """Stage 6: every retriever on every test, and the answers of the fine-tuned model."""
        asked = {test: file for test, file in self.tests().items() if file is not None}
        for retriever, models in self.retrievers().items():
            for name in models:
                model = self.model("encoder" if retriever == "bm25" else name)
                bm25 = {"method": "bm25"} if retriever == "bm25" else {}
                out = self.outcome(name, "probe")
                recall_only = () if retriever == "realm" else ("--set", "read=0")
                argv = self._command("probe", *recall_only, kb=self.kb, model=model, **bm25, out=out)
                yield Stage(MEASURE, f"probe {name}", argv, out, (model / "realm.json",), quiet=True)
                for test, file in asked.items():
                    yield self._evaluate(name, model, test, file, **bm25)
        for test, file in asked.items():
            yield self._evaluate("qa", self.model("qa"), test, file)

    def answering(self) -> Iterator[Stage]:
        """Stage 7: a few questions, and a masked sentence."""
        kb, qa, realm = self.kb, self.model("qa"), self.model("realm")
        for question, note in self._questions_to_ask():
            argv = self._command("answer", question, "--set", "answers=1", kb=kb, model=qa)
            yield Stage(ANSWER, "answer", argv, note=note)
        yield Stage(ANSWER, "fill", self._command("fill", self.config.fill, kb=kb, model=realm))

    def _pretrain(self, section: Section, name: str, seed: int, *settings: str) -> Stage:
        out, start = self.model(name, seed), self.model("ict", seed)
        return self._train(
            section, "pretrain", out, seed, *settings, kb=self.kb, model=start, questions=self.dev
        )

    def _longer_ict(self, seed: int) -> Iterator[Stage]:
        """ICT from the same encoder for the seconds of all that REALM had, the making of that encoder included."""
        stages = read_manifest(self.model("realm", seed))["stages"]
        seconds = sum(last_record(stages, stage)["seconds"] for stage in ("mlm", "ict", "pretrain"))
        ict = last_record(stages, "ict")
        if not ict["steps"]:
            raise InputError(
                "ict-same-seconds needs ICT steps to know what one costs, and [ict] has steps = 0"
            )
        steps = max(1, round(seconds * ict["steps"] / max(ict["seconds"], 0.1)))
        out, start = self.model("ict-same-seconds", seed), self.model("encoder")
        yield self._train(CONTROLS, "ict", out, seed, f"steps={steps}", kb=self.kb, init=start)
        yield self._index(CONTROLS, out)

    def _train(
        self, section: Section, verb: str, makes: Path, seed: int, *settings: str, **flags: Path
    ) -> Stage:
        if self.config.seeds != (0,):
            settings = (*settings, f"seed={seed}")
        words = [word for setting in settings for word in ("--set", setting)]
        return Stage(section, f"{verb} {makes.name}", self._command(verb, *words, **flags, out=makes), makes)

    def _index(self, section: Section, model: Path) -> Stage:
        makes = folder_of(self.kb, read_manifest(model)["passage_fingerprint"])
        return Stage(
            section, f"index {model.name}", self._command("index", kb=self.kb, model=model), makes, quiet=True
        )

    def _evaluate(self, name: str, model: Path, test: str, file: Path, **flags: str) -> Stage:
        out = self.outcome(name, test)
        argv = self._command("evaluate", kb=self.kb, model=model, questions=file, **flags, out=out)
        return Stage(MEASURE, f"evaluate {name} {test}", argv, out, (model / "realm.json", file), quiet=True)

    def _command(self, verb: str, *words: str, **flags: str | Path) -> tuple[str, ...]:
        """The words behind `realm`, as they are typed."""
        named = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        return (*verb.split(), *words, *named, "--config", self.preset)

    def _questions_to_ask(self) -> list[tuple[str, str]]:
        """Questions with a note of what is expected; made ones are drawn blindly, not picked."""
        if self.config.ask:
            return [(question, "") for question in self.config.ask]
        lines = [json.loads(line) for line in self.dev.read_text(encoding="utf-8").splitlines()]
        drawn = random.Random(0).sample(lines, min(5, len(lines)))
        return [(line["question"], f"expected: {' or '.join(line['answers'])}") for line in drawn]
