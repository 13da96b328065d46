"""Compares ways to adapt a retriever to a corpus without questions: `realm adapt`, TSDAE, and generative pseudo labelling.

    python benchmarks/adapting.py scifact --work runs/scifact --minutes 10
    python benchmarks/adapting.py --small                  # a few made-up documents, to see whether everything runs

FOLDER is a test collection in the format of BEIR. Only its corpus is used for adapting, and the queries only for measuring.
All systems start from the layers of all-MiniLM-L6-v2, and rank the same passages (`realm.measures`):

bm25                   no model
minilm                 the model unchanged; 384 numbers per vector
minilm + tsdae         the DenoisingAutoEncoderLoss of sentence-transformers (Wang et al. 2021), 8 passages per step, constant
                       rate 3e-5; 60 % of the words of a passage are deleted
minilm + gpl           generative pseudo labelling with the MarginMSELoss of sentence-transformers (Wang et al. 2022), 16
                       questions per step, constant rate 2e-5. This method needs a question generator and a cross-encoder.
                       Here `realm questions` makes the questions by rules, and the score of a question and a passage is the
                       score of the best span by the span reader of realm-small. A negative is one of the best 20 passages of
                       BM25 and of minilm. The row is missing if fewer than 100 questions can be made
realm-small            the layers of minilm with a projection to 128 numbers
realm-small + adapt    `realm adapt`, which trains only the projection of queries
hybrid                 the default method of realm-small: its scores and the scores of BM25 together
hybrid + adapt         the same with the adapted model

`--minutes` is the time limit of `realm adapt`, which ends earlier if all its steps are made, and the CPU time that the two
other methods get; for generative pseudo labelling, this includes making questions and reading passages. All methods may use the
vectors of the passages by the unchanged model, whose CPU time is not counted.

Each result is compared with that of the system that was adapted, by a paired bootstrap over the queries. Complete steps are
kept in the folder `--work`, so the same command continues after an interruption. Needs the extras `minilm` and `beir`, and
sentence-transformers 6. Prints a table, and one JSON object as the last line.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shared

sys.path.insert(0, str(shared.HOME))  # a file that is run by its path does not find the package `realm`

from realm.environment import set_torch_environment

if sys.argv[1:2] == ["--one"]:  # as in the command line
    set_torch_environment()

if TYPE_CHECKING:
    import numpy as np
    from sentence_transformers import SentenceTransformer
    from torch import Tensor, nn

    from realm.model.folder import Model
    from realm.store.knowledge_base import KnowledgeBase

MINILM, SMALL = "package:all-minilm-l6-v2", "package:realm-small"
SYSTEMS = {
    "bm25": None,
    "minilm": None,
    "minilm + tsdae": "minilm",
    "minilm + gpl": "minilm",
    "realm-small": None,
    "realm-small + adapt": "realm-small",
    "hybrid": None,
    "hybrid + adapt": "hybrid",
}
"""Name of a system -> the system that it was adapted from."""
WORDPIECES = 128
"""Longest text in training with sentence-transformers."""
DELETED = 0.6
NEGATIVES = 20
"""Passages of BM25, and of minilm, from which the negative of a question is drawn."""
FEWEST_QUESTIONS = 100
"""With fewer made questions, generative pseudo labelling is left out."""
PAIRS_FOR_SCALE = 256
"""Triples from which the scale of the span scores is computed."""


def main() -> None:
    """Runs all steps that are not complete, and prints the results."""
    if sys.argv[1:2] == ["--one"]:
        STEPS[sys.argv[2]](*sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="test collection in the format of BEIR")
    parser.add_argument("--work", type=Path, help="folder for knowledge base, models and rankings")
    parser.add_argument("--split", default="test", help="split of the collection (default: test)")
    parser.add_argument("--minutes", type=float, default=10, help="time limit of each method (default: 10)")
    parser.add_argument("--tagger", default="spacy:en_core_web_sm", help="tagger, as of `realm kb build`")
    parser.add_argument("--small", action="store_true", help="a few made-up documents, and a few seconds")
    args = parser.parse_args()
    if args.small == (args.folder is not None) or (args.work is None) != args.small:
        parser.error("give FOLDER and --work, or only --small")
    if not args.small:
        compare(args.folder.resolve(), args.work.resolve(), args.split, args.minutes, args.tagger)
        return
    with tempfile.TemporaryDirectory() as folder:
        made_up_collection(Path(folder))
        compare(Path(folder), Path(folder) / "work", "test", 0.2, "rules")


def compare(folder: Path, work: Path, split: str, minutes: float, tagger: str) -> None:
    """Adapts and ranks, and prints the results."""
    steps, kb, adapted = Steps(work), str(work / "kb"), str(work / "adapted")
    beir, made = str(folder), str(work / "questions")
    # realm-small was trained with these held-out passages, which `realm adapt` does not use.
    settings = ["--tagger", tagger, "--set", "passage_tokens=112", "--set", "held_out=0.1"]
    source = [str(folder / "corpus.jsonl"), "--out", kb, "--tokenizer", SMALL]
    steps.realm("kb", "kb", "build", *source, *settings)
    steps.realm("index", "index", "--kb", kb, "--model", SMALL)
    if not steps.done("adapt"):  # else the time before an interruption would be missing
        shutil.rmtree(work / "adapted.training", ignore_errors=True)
    limit = ["--minutes", str(minutes), "--out", adapted]
    adapting = steps.realm("adapt", "adapt", "--kb", kb, "--model", SMALL, *limit)
    for name, words in {
        "bm25": ["--method", "bm25"],
        "realm-small": ["--method", "dense", "--model", SMALL],
        "realm-small + adapt": ["--method", "dense", "--model", adapted],
        "hybrid": ["--method", "hybrid", "--model", SMALL],
        "hybrid + adapt": ["--method", "hybrid", "--model", adapted],
    }.items():
        measured = ["--beir", beir, "--split", split, "--save-run", str(work / f"{name}.trec")]
        steps.realm(f"rank {name}", "evaluate", "--kb", kb, *words, *measured)

    steps.one("rank minilm", MINILM, kb, beir, split, str(work / "minilm.trec"))
    making = steps.realm("questions", "questions", "--kb", kb, "--out", made)
    trained = {"realm-small + adapt": adapting, "hybrid + adapt": adapting}
    methods = {"tsdae": 0.0, "gpl": making}
    if len(made_questions(work)) < FEWEST_QUESTIONS:
        print(
            f"{made} has fewer than {FEWEST_QUESTIONS} questions: no generative pseudo labelling",
            file=sys.stderr,
        )
        del methods["gpl"]
    for method, spent in methods.items():
        out, name = str(work / method), f"minilm + {method}"
        trained[name] = spent + steps.one(method, kb, str(60 * minutes - spent), out)
        steps.one(f"rank {method}", out, kb, beir, split, str(work / f"{name}.trec"))
    print_results(folder, work, split, trained)


class Steps:
    """Runs commands whose results stay in a folder. A complete command does not run again."""

    def __init__(self, work: Path):
        self._file = work / "steps.json"
        work.mkdir(parents=True, exist_ok=True)
        self._seconds: dict[str, float] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def done(self, name: str) -> bool:
        """Whether the step is complete."""
        return name in self._seconds

    def realm(self, name: str, *words: str) -> float:
        """Runs a `realm` command -> its CPU seconds."""
        return self._run(name, shared.realm(*words))

    def one(self, name: str, *words: str) -> float:
        """Runs a function of `STEPS` in a separate process -> the CPU seconds of the process."""
        return self._run(name, [sys.executable, __file__, "--one", name.split()[0], *words])

    def _run(self, name: str, command: Sequence[str]) -> float:
        if not self.done(name):
            print(f"{name} ...", file=sys.stderr, flush=True)
            self._seconds[name] = round(shared.spent_by(command).cpu_seconds, 1)
            self._file.write_text(json.dumps(self._seconds, indent=1))
        return self._seconds[name]


def print_results(folder: Path, work: Path, split: str, trained: dict[str, float]) -> None:
    """Measures the rankings, and prints a line per system."""
    from realm.measures.collection import read_collection
    from realm.measures.paired import compare_rankings
    from realm.measures.ranking import measure
    from realm.measures.runs import read_run

    collection = read_collection(folder, split)
    runs = {name: work / f"{name}.trec" for name in SYSTEMS}
    found = {name: measure(collection, read_run(run)) for name, run in runs.items() if run.exists()}
    rows: list[shared.Row] = []
    for name in found:
        start = SYSTEMS[name]
        row: shared.Row = {"system": name, "cpu s": trained.get(name)}
        row |= {measured: one["mean"] for measured, one in found[name].as_dict()["measures"].items()}
        difference = (
            compare_rankings(collection, found[name], found[start])["difference"]["ndcg@10"]
            if start
            else None
        )
        row |= {"against": start, "ndcg@10 +-": difference and difference["points"]}
        row["interval"] = difference and f"{difference['low']:+.1f} to {difference['high']:+.1f}"
        rows.append(row | {"p": difference and difference["p"]})
    shared.print_table(rows)
    about = {
        "collection": folder.name,
        "queries": len(collection.queries),
        "made questions": len(made_questions(work)),
    }
    print(json.dumps(about | {"date": date.today().isoformat(), **shared.machine(), "rows": rows}))


def made_questions(work: Path) -> list[dict[str, Any]]:
    """The questions of `realm questions`."""
    files = [work / "questions" / f"{part}.jsonl" for part in ("train", "dev")]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def rank(name: str, kb: str, folder: str, split: str, out: str) -> None:
    """Ranks the documents with a model of sentence-transformers; writes the ranking, and the vectors of the passages."""
    import numpy as np

    from realm.hub import encoder_folder
    from realm.measures.collection import read_collection
    from realm.measures.ranking import rank_documents
    from realm.measures.runs import write_run
    from realm.store.knowledge_base import KnowledgeBase

    opened, model = KnowledgeBase.open(kb), load(encoder_folder(name))
    passage_ND = encode(model, texts_of(opened))
    np.save(Path(out).with_suffix(".npy"), passage_ND)

    def search(questions: Sequence[str], k: int) -> "tuple[np.ndarray, np.ndarray]":
        return best(encode(model, questions) @ passage_ND.T, k)

    write_run(Path(out), rank_documents(opened, read_collection(folder, split).queries, search))


def best(score_QN: "np.ndarray", k: int) -> "tuple[np.ndarray, np.ndarray]":
    """The k best scores of each row, and their numbers."""
    import torch

    found = torch.from_numpy(score_QN).topk(min(k, score_QN.shape[1]))
    return found.values.numpy(), found.indices.numpy()


def tsdae(kb: str, seconds: str, out: str) -> None:
    """Trains MiniLM as a denoising autoencoder on the passages."""
    from sentence_transformers.sentence_transformer.losses import DenoisingAutoEncoderLoss

    from realm.hub import encoder_folder
    from realm.store.knowledge_base import KnowledgeBase

    model, texts, draw = load(encoder_folder(MINILM)), texts_of(KnowledgeBase.open(kb)), random.Random(0)

    def without_words(text: str) -> str:
        words = text.split()
        return " ".join(word for word in words if draw.random() >= DELETED) or draw.choice(words)

    def batch() -> "tuple[list[list[str]], Tensor]":
        import torch

        whole = draw.sample(texts, min(8, len(texts)))
        return [[without_words(text) for text in whole], whole], torch.zeros(len(whole))

    train(model, DenoisingAutoEncoderLoss(model), batch, 3e-5, float(seconds))
    model.save(out)


def gpl(kb: str, seconds: str, out: str) -> None:
    """Trains MiniLM on made questions, so that score differences repeat those that the span reader computes."""
    import numpy as np
    from sentence_transformers.sentence_transformer.losses import MarginMSELoss

    from realm.hub import encoder_folder
    from realm.model.folder import load_model
    from realm.search.retriever import Retriever
    from realm.store.knowledge_base import KnowledgeBase

    opened, model, reader = KnowledgeBase.open(kb), load(encoder_folder(MINILM)), load_model(SMALL)
    texts, draw, work = texts_of(opened), random.Random(0), Path(out).parent
    bodies = opened.texts()
    made = made_questions(work)
    questions = [one["question"] for one in made]
    positive = opened.passage_numbers([one["passage_id"] for one in made]).tolist()
    passage_ND = np.load(work / "minilm.npy")
    question_QD = encode(model, questions)
    _, by_vectors = best(question_QD @ passage_ND.T, NEGATIVES)
    _, by_words = Retriever(opened).search(questions, NEGATIVES, "bm25", None)
    negatives = [
        sorted({*own.tolist(), *others.tolist()} - {right, -1})
        for own, others, right in zip(by_vectors, by_words, positive, strict=True)
    ]

    def triples(count: int) -> list[tuple[int, int, int]]:
        """Numbers of a question, its passage, and a negative."""
        drawn = [draw.randrange(len(questions)) for _ in range(count)]
        return [(one, positive[one], draw.choice(negatives[one])) for one in drawn]

    def margins(drawn: list[tuple[int, int, int]]) -> "Tensor":
        """Differences of the span scores of the passage and the negative."""
        asked = [questions[one] for one, _, _ in drawn]
        return span_scores(reader, asked, [bodies[p] for _, p, _ in drawn]) - span_scores(
            reader, asked, [bodies[n] for _, _, n in drawn]
        )

    # MiniLM's scores are cosines. The scale of the span scores is that of the cosines before training.
    few = triples(PAIRS_FOR_SCALE)
    cosines = [float(question_QD[q] @ (passage_ND[p] - passage_ND[n])) for q, p, n in few]
    read = margins(few).numpy()
    scale = float(np.std(cosines) / np.std(read))
    right, by_cosine = (np.mean(np.asarray(differences) > 0) for differences in (read, cosines))
    print(
        f"{len(questions)} questions; the passage of the question has a higher score than the negative for {right:.0%} by the "
        f"reader, {by_cosine:.0%} by MiniLM",
        file=sys.stderr,
    )

    def batch() -> "tuple[list[list[str]], Tensor]":
        drawn = triples(16)
        columns = [[questions[q] for q, _, _ in drawn], *([texts[row[n]] for row in drawn] for n in (1, 2))]
        return columns, scale * margins(drawn)

    train(model, MarginMSELoss(model), batch, 2e-5, float(seconds))
    model.save(out)


def span_scores(model: "Model", questions: Sequence[str], texts: Sequence[str]) -> "Tensor":
    """The score of the best span of each text for its question -> [B]."""
    import torch

    from realm.model.device import autocast
    from realm.model.modes import evaluating
    from realm.qa.reading import joint_reading

    assert model.span_reader is not None
    reading = joint_reading(model.tokenizer.encode(questions), texts, model.tokenizer, model.lengths)
    with torch.no_grad(), evaluating(model.span_reader), autocast(model.device, "auto"):
        return model.span_reader(reading.tokens, reading.body_BT).flatten(1).amax(dim=1).float()


def train(
    model: "SentenceTransformer",
    loss: "nn.Module",
    batch: "Callable[[], tuple[list[list[str]], Tensor]]",
    rate: float,
    seconds: float,
) -> None:
    """Trains with a loss of sentence-transformers until the process has used this CPU time."""
    import torch

    from realm.model.device import autocast

    optimizer = torch.optim.AdamW(loss.parameters(), lr=rate, weight_decay=0)
    longest, model.max_seq_length = model.max_seq_length, WORDPIECES
    loss.train()
    step, means = 0, []
    while time.process_time() < seconds:
        columns, labels = batch()
        with autocast(torch.device("cpu"), "auto"):
            value = loss([model.preprocess(texts) for texts in columns], labels)
        value.backward()
        torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        means.append(float(value.detach()))
        if step % 20 == 0:
            print(f"step {step}, loss {sum(means[-20:]) / 20:.4g}", file=sys.stderr, flush=True)
    model.max_seq_length = longest
    model.eval()


def load(folder: str) -> "SentenceTransformer":
    """The model of sentence-transformers in a folder."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device="cpu")


def texts_of(kb: "KnowledgeBase") -> list[str]:
    """The title and the text of each passage, as BEIR joins them."""
    return [f"{title} {text}".strip() for title, text in zip(kb.titles, kb.texts(), strict=True)]


def encode(model: "SentenceTransformer", texts: Sequence[str]) -> "np.ndarray":
    """Vectors of texts -> [N, D] float32."""
    import torch

    from realm.model.device import autocast

    with autocast(torch.device("cpu"), "auto"):
        found = model.encode(list(texts), batch_size=64, convert_to_tensor=True, show_progress_bar=False)
    return found.float().numpy()


def made_up_collection(folder: Path) -> None:
    """Writes a small collection: documents about invented towns, and a question about each of some towns."""
    draw = random.Random(0)
    syllables = ["ar", "bel", "cor", "dun", "el", "fen", "gar", "hal", "iv", "jar", "kel", "lor"]
    names = [f"{one}{other}".capitalize() for one in syllables for other in syllables if one != other]
    texts = {
        name: f"{name} is a town in Norland. {name} was founded in {draw.randint(1100, 1900)} by Anna of {names[-1 - n % 30]}. "
        f"It was destroyed in {draw.randint(1900, 2000)}."
        for n, name in enumerate(names)
    }
    (folder / "qrels").mkdir()
    for file, lines in {
        "corpus.jsonl": [{"_id": name, "title": name, "text": text} for name, text in texts.items()],
        "queries.jsonl": [{"_id": f"q-{name}", "text": f"who founded {name}?"} for name in names[:20]],
    }.items():
        (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    judged = "".join(f"q-{name}\t{name}\t1\n" for name in names[:20])
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")


STEPS: dict[str, Callable[..., None]] = {"rank": rank, "tsdae": tsdae, "gpl": gpl}

if __name__ == "__main__":
    main()
