"""The commands of a table: the stages of `realm compare` and `realm ablate`, in their order.

Stages that do not depend on each other are in different chains, so that several of them can run at the same time.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from realm.compare.plan import READING, TablePlan
from realm.compare.rows import BM25, DRQA, PUBLISHED, STARTS, encoder_of, row_settings
from realm.compare.sections import CORPUS, MEASURING, QUESTIONS, READERS, ROWS, STARTING
from realm.model.manifest import MANIFEST, read_manifest
from realm.stages.parallel import Chain
from realm.stages.runner import Section, Stage
from realm.store.vectors import first_commit_of, folder_of
from realm.systems.system import SYSTEM, is_system


def preparing(plan: TablePlan) -> Iterator[Chain]:
    """Stages that convert a published model, make the knowledge bases, and make questions if no files are given."""
    if PUBLISHED in plan.starts():
        model = plan.start_model(PUBLISHED, plan.config.seeds[0])
        given = {flag: word for flag, word in asdict(plan.data.published).items() if word}
        source = given.pop("checkpoint")
        parts = [word for flag, value in given.items() for word in (f"--{flag}", value)]
        convert = ("convert", source, str(model), "--model-only", *parts)
        kb = plan.kb_of(PUBLISHED)
        stages = [
            Stage(CORPUS, "convert published", convert, model),
            Stage(CORPUS, "kb build published", _build(plan, kb, model), kb),
        ]
        yield Chain(PUBLISHED, stages)
    built = {"kb build": plan.kb}
    if plan.uses_text:
        built["kb build text"] = plan.text_kb
    if plan.reads_first:
        built["kb build reading"] = plan.reading_kb
    for name, kb in built.items():
        yield Chain.of(Stage(CORPUS, name, _build(plan, kb, plan.data.encoder), kb))
    if not plan.data.train:
        argv = _command(plan, "questions", kb=plan.kb, out=plan.made)
        yield Chain.of(Stage(QUESTIONS, "questions", argv, plan.made / "dev.jsonl"), after=("kb build",))


def starting(plan: TablePlan) -> Iterator[Chain]:
    """Stages that make the starts, compute the vectors of passages, and measure each start on masked facts.

    Each start is measured at once, so that a corpus without masked facts is reported before the long training.
    """
    for name in plan.starts():
        start = plan.start(name)
        for seed in plan.seeds_of(name):
            before = [plan.named_start(one, seed) for one in (start.init, start.encoder_of) if one]
            yield Chain(plan.named_start(name, seed), _start_stages(plan, name, seed), tuple(before))


def _start_stages(plan: TablePlan, name: str, seed: int) -> Iterator[Stage]:
    """The stages of one start. The stage of the index needs the finished model."""
    model = plan.start_model(name, seed)
    if name != PUBLISHED:
        yield _make_start(plan, name, seed)
    if STARTS[name].made_by != "convert":  # "convert" copies the embedder of `init`
        yield _index(plan, plan.kb_of(name), model, STARTING, f"index {model.name}")
    if name in plan.probed():
        yield _probe(plan, model, plan.probe(name, seed))
    if name == "encoder":
        yield _probe(plan, model, plan.probe(BM25, seed), method=BM25)


def _make_start(plan: TablePlan, name: str, seed: int) -> Stage:
    start, out = plan.start(name), plan.start_model(name, seed)
    init = plan.start_model(start.init, seed) if start.init else plan.data.encoder
    settings = plan.start_settings(name, seed)
    argv: tuple[str, ...]
    if start.made_by == "convert":
        encoder = plan.start_model(start.encoder_of, seed)
        argv = ("convert", str(init), str(out), "--encoder-of", str(encoder))
    elif start.made_by == "pretrain":
        text = {"text": plan.text_kb} if start.other_text else {}
        argv = _command(plan, "pretrain", *settings, kb=plan.kb, model=init, out=out, **text)
    else:
        argv = _command(plan, start.made_by, *settings, kb=plan.kb, init=init, out=out)
    return Stage(STARTING, f"{argv[0]} {out.name}", argv, out)


def reading(plan: TablePlan) -> Iterator[Chain]:
    """Stages that train the readers of the rows on the questions of `data.reading`."""
    read: dict[Path, tuple[Path, int]] = {}  # folder of a reader -> its start, and the seed
    for name, row in plan.rows().items():
        for seed in plan.config.seeds[: plan.config.answer_seeds]:
            reader = plan.reader(name, seed)
            if reader is not None:
                read.setdefault(reader, (plan.start_model(encoder_of(row.start), seed), seed))
    for out, (start, seed) in read.items():
        yield Chain(out.name, _reading_stages(plan, start, out, seed))


def _reading_stages(plan: TablePlan, start: Path, out: Path, seed: int) -> Iterator[Stage]:
    yield _index(plan, plan.reading_kb, start, READERS, f"index {READING} {out.name}")
    asked = {part: plan.questions(f"{READING}-{part}") for part in ("train", "dev")}
    argv = _command(
        plan, "finetune", *plan.reading_settings(seed), kb=plan.reading_kb, model=start, out=out, **asked
    )
    yield Stage(READERS, f"read {out.name}", argv, out)


def training(plan: TablePlan) -> Iterator[Chain]:
    """Stages that train each row on the questions."""
    asked = {"train": plan.questions("train"), "dev": plan.questions("dev")}
    for name, row in plan.rows().items():
        if row.of or plan.is_published_reader(row.start):
            continue
        for seed in plan.config.seeds[: plan.config.answer_seeds]:
            out, start = plan.row_model(name, seed), plan.start_model(row.start, seed)
            verb = f"baseline {row.system}" if row.system else "finetune"
            reader = plan.reader(name, seed)
            reads: dict[str, Path] = {}
            if reader is not None and row.system:
                start = reader
            elif reader is not None:
                reads = {"reader": reader}
            elif row.system == DRQA and plan.reads_first:
                reads = {
                    "reading_kb": plan.reading_kb,
                    "reading_train": plan.questions(f"{READING}-train"),
                }
            argv = _command(
                plan,
                verb,
                *row_settings(row, seed),
                kb=plan.kb_of(row.start),
                model=start,
                out=out,
                **asked,
                **reads,
            )
            yield Chain.of(Stage(ROWS, f"{verb} {out.name}", argv, out))


def measuring(plan: TablePlan) -> Iterator[Chain]:
    """Stages that measure the retrieval of BM25 and of the starts, and the answers of each row."""
    return map(Chain.of, _measurements(plan))


def _measurements(plan: TablePlan) -> Iterator[Stage]:
    for test, file in plan.tests().items():
        out = plan.retrieval(BM25, plan.config.seeds[0], test)
        argv = _command(plan, "evaluate", kb=plan.kb, questions=file, method=BM25, out=out)
        yield Stage(MEASURING, f"retrieve {BM25} {test}", argv, out, quiet=True)
    for place, seed in enumerate(plan.config.seeds):
        for test, file in plan.tests().items():
            for start in plan.before_questions():
                if seed in plan.seeds_of(start):
                    yield _retrieval(plan, start, seed, test, file)
            for name in plan.rows() if place < plan.config.answer_seeds else ():
                yield _answers(plan, name, seed, test, file)
    if plan.predicts_spans:
        model = plan.start_model("realm", plan.config.seeds[0])
        argv = _command(plan, "knn", kb=plan.kb, model=model, out=plan.datastore)
        report = plan.datastore / "report.json"
        yield Stage(MEASURING, "knn", argv, report, (manifest_of(model),), quiet=True)


def _retrieval(plan: TablePlan, start: str, seed: int, test: str, file: Path) -> Stage:
    """The stage that measures the retrieval of a start in a test."""
    model, out = plan.start_model(start, seed), plan.retrieval(start, seed, test)
    argv = _command(
        plan,
        "evaluate --retrieval-only",
        kb=plan.kb_of(start),
        model=model,
        questions=file,
        method="dense",
        out=out,
    )
    return Stage(MEASURING, f"retrieve {model.name} {test}", argv, out, (manifest_of(model),), quiet=True)


def _answers(plan: TablePlan, name: str, seed: int, test: str, file: Path) -> Stage:
    """The stage that measures the answers of a row in a test."""
    row, model, out = plan.table[name], plan.row_model(name, seed), plan.report(name, seed, test)
    predictions = plan.predictions(name, seed, test)
    argv = _command(
        plan,
        "evaluate",
        kb=plan.kb_of(row.start),
        model=model,
        questions=file,
        out=out,
        save_predictions=predictions,
        **({"method": row.method} if row.method else {}),
    )
    called = f"evaluate {plan.named(name, seed)} {test}"
    return Stage(MEASURING, called, argv, out, (manifest_of(model),), quiet=True, also_makes=predictions)


def _probe(plan: TablePlan, model: Path, out: Path, **how: str) -> Stage:
    argv = _command(plan, "probe", kb=plan.kb, model=model, out=out, **how)
    return Stage(STARTING, out.stem, argv, out, (manifest_of(model),), quiet=True)


def _build(plan: TablePlan, kb: Path, tokenizer: str | Path) -> tuple[str, ...]:
    kb_, build, *flags = _command(plan, "kb build", out=kb, tokenizer=tokenizer)
    return (kb_, build, *plan.sources(kb), *flags)


def _index(plan: TablePlan, kb: Path, model: Path, section: Section, name: str) -> Stage:
    fingerprint = read_manifest(model)["passage_fingerprint"]
    argv = _command(plan, "index", kb=kb, model=model)
    done = first_commit_of(kb, fingerprint)
    return Stage(section, name, argv, folder_of(kb, fingerprint), quiet=True, also_makes=done)


def _command(plan: TablePlan, verb: str, *settings: str, **flags: str | Path) -> tuple[str, ...]:
    """Arguments of `realm` for a command. `settings` come last, so that they win against the changed settings of the plan."""
    words = verb.split()
    named = [part for flag, value in flags.items() for part in (f"--{flag.replace('_', '-')}", str(value))]
    table = ".".join(words) if words[0] == "baseline" else words[0]
    changed = [part for one in (*plan.changed.get(table, ()), *settings) for part in ("--set", one)]
    config = () if plan.preset is None else ("--config", plan.preset)
    return (*words, *named, *changed, *config)


def manifest_of(folder: Path) -> Path:
    """The manifest of a trained model or system.

    If the model was trained again after a report was written, the manifest is newer than the report.
    """
    return folder / (SYSTEM if is_system(folder) else MANIFEST)
