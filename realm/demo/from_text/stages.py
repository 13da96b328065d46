"""Stages of `realm demo --from-text` for one corpus: the commands in their order, and the explanation of each section.

Stages are generated one at a time, because some stages need the results of earlier stages. The name of an index depends on the
trained model, and the control `ict-same-seconds` needs the training time of the earlier stages.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realm.demo.stages import SENTENCE
from realm.errors import InputError
from realm.model.manifest import last_record, read_manifest
from realm.stages.runner import Section, Stage
from realm.store.vectors import first_commit_of, folder_of

Control = Literal["ict-same-seconds", "shuffled", "entity"]


@dataclass(frozen=True)
class FromTextConfig:
    """Settings of the demo from plain text. The commands of the stages have their own tables in the same configuration file."""

    corpora: tuple[str, ...] = ("package:vital-articles",)
    """Sources of documents. The demo runs once for each source, with a separate knowledge base."""
    encoder: str = "package:realm-mini"
    """Encoder from which every model starts. The tokenizer of this encoder is used for the text."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of ICT, pre-training and the controls; the model of the first seed is fine-tuned."""
    controls: tuple[Control, ...] = ()
    """Control runs with which REALM is compared."""

    def __post_init__(self) -> None:
        for name in ("corpora", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: the demo needs at least one")


CORPUS = Section(
    "1. Build a knowledge base",
    "Documents are split into passages at ends of sentences. Names and dates are marked, because pre-training masks them.\n"
    "Questions are made from the same text by rules: train questions for fine-tuning, dev questions for measuring.",
)
ENCODER = Section(
    "2. Make the encoder",
    "All models start from this masked language model (package:realm-mini was trained on plain text only, without labels).\n"
    'The embedder, which computes a vector for a text, is not trained yet. In the tables this model is the row "untrained\n'
    'start".',
)
ICT = Section(
    "3. Warm up the embedder: inverse cloze task (ICT)",
    "The embedder is trained to find the passage from which a sentence was taken.\n"
    "Then `realm index` computes the vectors of all passages, so that the best passages for a query can be found.",
)
PRETRAIN = Section(
    "4. REALM pre-training",
    "A name or date is masked in a sentence, passages are retrieved, and the reader predicts the masked words from the\n"
    "sentence and each passage. Training raises the scores of passages that help the reader. The index is rebuilt in the\n"
    "background during training. At the end, the index of the saved model is in the knowledge base.",
)
CONTROLS = Section(
    "4b. Train the controls",
    "The controls test other explanations of an improvement by REALM. ict-same-seconds: ICT for as many seconds as making\n"
    "the encoder, ICT and REALM pre-training took together. shuffled: REALM, with the reader's likelihoods shuffled among the\n"
    "passages. entity: REALM without a reader; all passages that contain the masked words count as equally helpful.",
)
FINETUNE = Section(
    "5. Fine-tune on questions",
    "On the train questions, the reader is trained to find the answer in the best retrieved passages, and the embedder is\n"
    "trained to find passages that contain the answer. The dev questions are about other documents; the weights with which\n"
    "the model answers most dev questions exactly are kept.",
)
MEASURE = Section(
    "6. Measure each retriever",
    "Masked facts: a name or date is masked in a sentence that was not used in training. The fact is found if another\n"
    "passage with this name or date is retrieved. A question is found if a passage that contains the answer is retrieved. All\n"
    "retrievers get the same queries.",
)
ANSWER = Section(
    "7. Answers with evidence",
    "[[ ]] marks the answer in the passage. p(z|x) is the retriever's probability of passage z for question x, and p(y|z,x)\n"
    "is the reader's probability of words y given question x and passage z.",
)


@dataclass(frozen=True)
class DemoRun:
    """The demo of one corpus: the paths of its files, and the commands of its stages."""

    config: FromTextConfig
    preset: str
    """Configuration file or preset of every stage."""
    source: str
    folder: Path
    question_files: tuple[Path, ...] = ()
    """Question files on which retrievers are measured, in addition to the dev questions made from the corpus."""

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
        """Folder of a model. For every seed except the first, the name of the folder ends with the seed."""
        first = seed is None or seed == self.config.seeds[0]
        return self.folder / "models" / (name if first else f"{name}-{seed}")

    def outcome(self, model: str, test: str) -> Path:
        """File with the report on a model in one of the `tests`, and the outcome of each query."""
        return self.folder / "reports" / f"{model}.{test}.json"

    def retrievers(self) -> dict[str, list[str]]:
        """Retriever -> names of the folders of its models, one per seed."""
        trained = {
            name: [self.model(name, seed).name for seed in self.config.seeds]
            for name in ("ict", "realm", *self.config.controls)
        }
        return {"bm25": ["bm25"], "encoder": ["encoder"], **trained}

    def tests(self) -> dict[str, Path | None]:
        """Test -> question file; None for the probe, which needs no question file.

        Raises:
            InputError: two question files have the same name, and their folders have the same name too.
        """
        named: dict[str, Path | None] = {"probe": None, "dev": self.dev}
        stems = [*named, *(file.stem for file in self.question_files)]
        for file in self.question_files:
            alone = stems.count(file.stem) == 1
            name = file.stem if alone else f"{file.resolve().parent.name}-{file.stem}"
            if name in named:
                raise InputError(
                    f"{file} and another question file both have the name {name}: rename one of these files"
                )
            named[name] = file
        return named

    def making(self) -> Iterator[Stage]:
        """Stages of sections 1 to 5, which make the models."""
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
        """Stages of section 6, which measure every retriever on every test, and the fine-tuned model on all question files."""
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
        """Stages of section 7, which answer a few questions and fill in a masked sentence."""
        kb, qa, realm = self.kb, self.model("qa"), self.model("realm")
        for question, note in self._questions_to_ask():
            argv = self._command("answer", question, "--set", "answers=1", kb=kb, model=qa)
            yield Stage(ANSWER, "answer", argv, note=note)
        yield Stage(ANSWER, "fill", self._command("fill", SENTENCE, kb=kb, model=realm))

    def _pretrain(self, section: Section, name: str, seed: int, *settings: str) -> Stage:
        out, start = self.model(name, seed), self.model("ict", seed)
        return self._train(
            section, "pretrain", out, seed, *settings, kb=self.kb, model=start, questions=self.dev
        )

    def _longer_ict(self, seed: int) -> Iterator[Stage]:
        """Stages that train and index `ict-same-seconds`: ICT for as many seconds as mlm, ict and pretrain took together."""
        stages = read_manifest(self.model("realm", seed))["stages"]
        seconds = sum(last_record(stages, stage)["seconds"] for stage in ("mlm", "ict", "pretrain"))
        ict = last_record(stages, "ict")
        if not ict["steps"]:
            raise InputError(
                "ict-same-seconds needs the time of an ICT step, but [ict] has steps = 0: set it to 1 or more"
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
        fingerprint = read_manifest(model)["passage_fingerprint"]
        return Stage(
            section,
            f"index {model.name}",
            self._command("index", kb=self.kb, model=model),
            folder_of(self.kb, fingerprint),
            quiet=True,
            also_makes=first_commit_of(self.kb, fingerprint),
        )

    def _evaluate(self, name: str, model: Path, test: str, file: Path, **flags: str) -> Stage:
        out = self.outcome(name, test)
        argv = self._command("evaluate", kb=self.kb, model=model, questions=file, **flags, out=out)
        return Stage(MEASURE, f"evaluate {name} {test}", argv, out, (model / "realm.json", file), quiet=True)

    def _command(self, verb: str, *words: str, **flags: str | Path) -> tuple[str, ...]:
        """Arguments of `realm` for a command."""
        named = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        return (*verb.split(), *words, *named, "--config", self.preset)

    def _questions_to_ask(self) -> list[tuple[str, str]]:
        """At most five random dev questions, each with a line that shows the expected answer."""
        lines = [json.loads(line) for line in self.dev.read_text(encoding="utf-8").splitlines()]
        drawn = random.Random(0).sample(lines, min(5, len(lines)))
        return [(line["question"], f"expected: {' or '.join(line['answers'])}") for line in drawn]
