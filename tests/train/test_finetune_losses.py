"""Labels and losses of fine-tuning, and which passages teach the reader."""

import json
import math
import re

import numpy as np
import pytest
import torch

from realm.errors import RealmError
from realm.index.versions import complete_index
from realm.model import states
from realm.model.calibration import Calibration
from realm.model.folder import load_model
from realm.model.losses import any_correct_loss
from realm.model.span_reader import SpanReader
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.question_files import Question
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document
from realm.tokens.layouts import NULL_PASSAGE, Lengths
from realm.train import examples as examples_room
from realm.train import finetune, span_losses
from realm.train.examples import Examples
from realm.train.finetune import FinetuneConfig, own_share, start_reader
from realm.train.run_config import generator
from realm.train.span_losses import counted, joint_scores
from tests.conftest import RIVERS
from tests.store.tiny import TinyTagger
from tests.train.stages import metrics
from tests.train.test_finetune import DEV, TRAIN, both_of, settings, train


@pytest.fixture
def examples(tiny_kb, tiny_model) -> Examples:
    start_reader(tiny_model, seed=0)
    return Examples(tiny_kb, tiny_model, TRAIN)


def test_passage_labels_are_a_plain_search_for_the_answer(tiny_kb, examples) -> None:
    numbers = np.tile(np.arange(len(tiny_kb)), (len(TRAIN), 1))
    holds = examples.holds(np.arange(len(TRAIN)), numbers)
    for row, question in enumerate(TRAIN):
        pattern = question.answers[0] if question.regex else rf"\b{question.answers[0]}\b"
        expected = [re.search(pattern, passage.text) is not None for passage in tiny_kb]
        assert holds[row].tolist() == expected


@pytest.mark.parametrize("kept", [1, 5, 12])
def test_few_kept_passages_give_the_same_labels_and_no_more_memory(
    tiny_kb, tiny_model, examples, monkeypatch, kept
) -> None:
    batches = [np.random.default_rng(n).integers(0, len(tiny_kb), (2, 4)) for n in range(6)]
    reader, rows = tiny_model.span_reader.eval(), np.array([0, 5])

    def seen(examples: Examples) -> list[torch.Tensor]:
        found = []
        for batch in batches:
            found.append(torch.from_numpy(examples.holds(rows, batch)))
            found += both_of(examples, reader, rows, batch[:, :2], torch.zeros(2, 4))
            sizes.append((len(examples._passages), len(np.unique(batch))))
        return found

    sizes: list[tuple[int, int]] = []
    wanted = seen(examples)
    sizes.clear()
    monkeypatch.setattr("realm.train.examples.PASSAGES_KEPT", kept)
    found = seen(Examples(tiny_kb, tiny_model, TRAIN))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert all(size <= max(kept, asked) for size, asked in sizes)


def test_passages_that_are_asked_for_again_are_not_read_again(tiny_kb, examples, monkeypatch) -> None:
    read: list[list[int]] = []
    passages = KnowledgeBase.passages
    monkeypatch.setattr(
        KnowledgeBase, "passages", lambda kb, numbers: read.append([*numbers]) or passages(kb, numbers)
    )
    monkeypatch.setattr("realm.train.examples.PASSAGES_KEPT", 4)
    for numbers in ([0, 1, 2], [0, 3], [4], [0, 3], [1]):
        examples.holds(np.array([0]), np.array([numbers]))
    assert [numbers for numbers in read if numbers] == [[0, 1, 2], [3], [4], [1]]


def test_substring_labels_are_a_raw_search_for_the_answer(tiny_kb, tiny_model) -> None:
    """As ORQA labels blocks: part of a word counts, another case does not."""
    questions = [Question("1", "?", ("rde",)), Question("2", "?", ("ARDEN",)), Question("3", "?", ("Arden",))]
    numbers = np.tile(np.arange(len(tiny_kb)), (3, 1))
    holds = Examples(tiny_kb, tiny_model, questions, "substring").holds(np.arange(3), numbers)
    assert holds.tolist() == [[answer in p.text for p in tiny_kb] for answer in ("rde", "ARDEN", "Arden")]
    assert holds.any(axis=1).tolist() == [True, False, True]


def test_reader_reads_as_many_wordpieces_as_asked(tiny_kb, tiny_model_folder, tmp_path, monkeypatch) -> None:
    longest = []
    inputs = examples_room.reading_inputs
    monkeypatch.setattr(
        examples_room, "reading_inputs", lambda *a: longest.append(inputs(*a).ids_BT.shape[1]) or inputs(*a)
    )
    out = train(tiny_kb, tmp_path / "out", tiny_model_folder, "steps=1", "reading_tokens=36", dev=[])
    assert max(longest) == 36 and load_model(out).lengths == Lengths(query=32, passage=48, reading=36)
    for wrong in (32, 81):
        with pytest.raises(RealmError, match=f"reading_tokens is {wrong}: .* 32 wordpieces, .* at most 80"):
            train(tiny_kb, tmp_path / "no", tiny_model_folder, f"reading_tokens={wrong}")


def test_span_labels_cut_the_answer_out_of_the_passage(tiny_kb, tiny_model, examples) -> None:
    """Every correct span, and no other, is a text that a plain search finds."""
    batch, number_BK = np.array([0, 5, 14]), np.array([[0, 1, 20], [10, 8, 3], [1, 3, 2]])
    reader = tiny_model.span_reader.eval()
    logit, correct = both_of(examples, reader, batch, number_BK, torch.zeros(3, 3))
    for row, question in enumerate(batch):
        passages = tiny_kb.passages(number_BK[row])
        grid = correct[row].view(3, 10, -1)
        start = 2 + len(tiny_model.tokenizer.encode([TRAIN[question].question])[0])
        encodings = tiny_model.tokenizer.encode_with_offsets([p.text for p in passages])
        for passage, encoding, found in zip(passages, encodings, grid, strict=True):
            texts = sorted(
                passage.text[encoding.starts[t - start] : encoding.ends[t - start + w]]
                for w, t in found.nonzero().tolist()
            )
            answer = TRAIN[question].answers[0]
            assert texts == sorted(
                re.findall(answer if TRAIN[question].regex else rf"\b{answer}\b", passage.text)
            )
    assert correct.any(dim=1).tolist() == [True, True, True]
    assert logit.isfinite()[correct].all()


def test_unknown_words_are_not_taken_for_one_another(own_kb, tiny_model) -> None:
    own_kb.add([Document("Oakham", "Oakham writes 漢字 on its walls.", "o")], TinyTagger())
    asked = [Question("1", "what is written?", ("日本",)), Question("2", "what is written?", ("walls",))]
    reader = start_reader(tiny_model, seed=0).eval()
    number = len(own_kb) - 1
    _, correct = both_of(
        Examples(own_kb, tiny_model, asked),
        reader,
        np.array([0, 1]),
        np.array([[number], [number]]),
        torch.zeros(2, 1),
    )
    assert correct.any(dim=1).tolist() == [False, True]


def test_joint_scores_are_span_score_plus_retrieval_score(tiny_model, examples) -> None:
    reader = tiny_model.span_reader.eval()
    batch, number_BK = np.array([0, 5]), np.array([[0, 1], [10, 8]])
    score = torch.tensor([[1.0, 2.0, 9.0], [3.0, -4.0, 9.0]])  # of three retrieved, two are read
    plain, _ = both_of(examples, reader, batch, number_BK, torch.zeros(2, 3))
    joint, _ = both_of(examples, reader, batch, number_BK, score)
    added = (joint - plain).view(2, 2, -1)
    for row in range(2):
        for column in range(2):
            values = added[row, column][plain.view(2, 2, -1)[row, column].isfinite()]
            assert torch.allclose(values, score[row, column].expand_as(values), atol=1e-5)


def test_losses_of_a_step_are_the_papers_written_out(tiny_kb, tiny_model_folder, tmp_path) -> None:
    """One step over all passages, computed again from the start's weights with plain Python sums."""
    out = train(
        tiny_kb, tmp_path / "out", tiny_model_folder, "steps=1", "retrieved=28", "batch_size=2", dev=[]
    )
    (logged,) = metrics(out)
    model = load_model(tiny_model_folder)
    reader = start_reader(model, 0).eval()
    examples, index = (
        Examples(tiny_kb, model, TRAIN),
        complete_index(tiny_kb, model, str(tiny_model_folder)).index,
    )
    batch = examples.batch(0, 0, 2)
    with torch.no_grad():
        query_BD = model.embedder.query(examples.inputs(batch))
        hits = index.search(query_BD, 28)
        logit, correct = both_of(examples, reader, batch, hits.number_BK[:, :5].numpy(), hits.score_BK)
    holds = examples.holds(batch, hits.number_BK.numpy())

    def loss(scores: list[float], right: list[bool]) -> float:
        total = sum(math.exp(s) for s in scores)
        return -math.log(sum(math.exp(s) for s, r in zip(scores, right, strict=True) if r) / total)

    rows = [row for row in range(2) if holds[row].any()]
    retriever = np.mean([loss(hits.score_BK[row].tolist(), holds[row].tolist()) for row in rows])
    rows = [row for row in range(2) if correct[row].any()]
    read = np.mean([loss(logit[row].tolist(), correct[row].tolist()) for row in rows]) if rows else 0.0
    assert logged["retriever_loss"] == pytest.approx(retriever, rel=2e-3)
    assert logged["reader_loss"] == pytest.approx(read, rel=2e-3)


def test_contrast_reads_one_passage_with_an_answer_and_the_best_without(tiny_kb, tiny_model) -> None:
    """The question's own document comes first, retrieved or not; without one, the best that holds an answer.

    A made question names a document, but has only retrieved passages.
    """
    passages = list(tiny_kb)
    texts = [passage.text for passage in passages]
    document = next(p.document_id for p in reversed(passages) if RIVERS[0] in p.text)
    own = next(n for n, p in enumerate(passages) if p.document_id == document and RIVERS[0] in p.text)
    named = Question("q", "which river?", (RIVERS[0],), document_id=document)
    unnamed = named._replace(document_id="")
    absent = Question("q", "which river?", ("Nile",), document_id="no such document")
    made = named._replace(passage_id=passages[own].id)
    examples = Examples(tiny_kb, tiny_model, [named, unnamed, absent, made])
    ranked = [n for n in range(len(texts)) if n != own]  # the question's own passage is not among them
    batch, number_BN = np.arange(4), np.tile(ranked, (4, 1))
    number_BN, holds_BN = examples.choose(
        batch, number_BN, examples.holds(batch, number_BN), True, np.zeros(len(batch), dtype=bool)
    )
    without = [n for n in ranked if RIVERS[0] not in texts[n]][:2]
    first = next(n for n in ranked if RIVERS[0] in texts[n])
    assert number_BN[0, :3].tolist() == [own, *without] and number_BN[1, :3].tolist() == [first, *without]
    assert number_BN[2].tolist() == ranked
    assert number_BN[3].tolist() == number_BN[1].tolist()
    assert sorted(number_BN[0]) == sorted([*ranked[:-1], own]) and sorted(number_BN[1]) == ranked
    assert np.array_equal(holds_BN, examples.holds(batch, number_BN))


def test_share_of_the_questions_is_read_without_a_passage_that_answers(tiny_kb, tiny_model) -> None:
    examples, batch = Examples(tiny_kb, tiny_model, TRAIN), np.zeros(400, dtype=np.int64)
    number_BN = np.tile(np.arange(len(tiny_kb)), (400, 1))
    holds_BN = examples.holds(batch, number_BN)
    for passages in ("retrieved", "contrast"):
        config = settings(f"passages={passages}", "unanswerable=0.3", "batch_size=400")
        drawn_B = finetune.unanswerable(config, 5)
        chosen_BN, chosen_holds_BN = examples.choose(
            batch, number_BN, holds_BN, passages == "contrast", drawn_B
        )
        without_B = ~chosen_holds_BN[:, :3].any(axis=1)
        assert 0.2 < without_B.mean() < 0.4
        assert np.array_equal(np.sort(chosen_BN), number_BN)
        if passages == "retrieved":
            assert np.array_equal(chosen_BN[~without_B], number_BN[~without_B])


def test_no_answer_is_right_where_no_passage_read_holds_one(tiny_kb, tiny_model, examples) -> None:
    always = tiny_model.span_reader.eval()
    finds_none = start_reader(tiny_model, seed=0, finds_none=True).eval()
    finds_none.load_state_dict(always.state_dict())
    texts = [passage.text for passage in tiny_kb]
    holding = next(n for n, text in enumerate(texts) if RIVERS[0] in text)
    empty = next(n for n, text in enumerate(texts) if RIVERS[0] not in text)
    batch, number_BK = np.array([0, 0]), np.array([[holding, empty], [empty, empty]])
    plain, right = both_of(examples, always, batch, number_BK, torch.ones(2, 2))
    logit, correct = both_of(examples, finds_none, batch, number_BK, torch.ones(2, 2))
    assert torch.equal(logit[:, :-1], plain) and torch.equal(correct[:, :-1], right)
    assert logit[:, -1].tolist() == [0.0, 0.0] and correct[:, -1].tolist() == [False, True]


@pytest.mark.parametrize("moves", ["update_passages=false", "update_passages=true"])
def test_input_embeddings_may_stay_as_they_are(tiny_kb, tiny_model_folder, tmp_path, moves) -> None:
    frozen = train(tiny_kb, tmp_path / "out", tiny_model_folder, moves, "input_embeddings=frozen", dev=[])
    start, model = load_model(tiny_model_folder), load_model(frozen)
    for before, after in (
        (start.reader.bert.bert, model.span_reader.encoder),
        (start.embedder.query.encoder, model.embedder.query.encoder),
    ):
        old = before.state_dict()
        same = {name for name, weights in after.state_dict().items() if torch.equal(weights, old[name])}
        assert same == {name for name in old if name.startswith("embeddings.")}


def test_fine_tuning_goes_on_with_the_span_reader_that_is_there(tiny_kb, tiny_model_folder, tmp_path) -> None:
    """The embedder stays as it is at a rate of 0, so that the index fits; what a reader can do is not changed."""
    fixed = ["retriever_rate=0", "passages=contrast"]
    first = train(tiny_kb, tmp_path / "first", tiny_model_folder, *fixed, "unanswerable=0.2", dev=[])
    again = train(
        tiny_kb, tmp_path / "again", first, *fixed, "steps=1", "learning_rate=0", "head_rate=1", dev=[]
    )
    start, one, two = load_model(tiny_model_folder), load_model(first), load_model(again)
    for model in (one, two):
        for name, weights in model.embedder.state_dict().items():
            assert torch.equal(weights, start.embedder.state_dict()[name])
    assert one.span_reader.config.finds_none and two.span_reader.config.finds_none
    old, new = one.span_reader.state_dict(), two.span_reader.state_dict()
    assert {name for name in old if not torch.equal(old[name], new[name])} == {
        name for name, _ in one.span_reader.named_parameters() if not name.startswith("encoder.")
    }
    plain = train(tiny_kb, tmp_path / "plain", tiny_model_folder, *fixed, "steps=1", dev=[])
    with pytest.raises(RealmError, match="always finds an answer"):
        train(tiny_kb, tmp_path / "no", plain, *fixed, "unanswerable=0.2")


def test_a_question_whose_passages_have_no_answer_is_not_counted_as_readable(
    tiny_kb, tiny_model_folder, tmp_path
) -> None:
    changed = ["passages=contrast", "unanswerable=0.99", "steps=1", "log_every=1"]
    out = train(tiny_kb, tmp_path / "out", tiny_model_folder, *changed, dev=[])
    assert [row["readable"] for row in metrics(out) if "readable" in row] == [0]


def test_every_question_comes_once_per_epoch_in_another_order(examples) -> None:
    batches = [examples.batch(0, step, 4) for step in range(30)]
    asked = np.concatenate(batches)
    epochs = asked[: 8 * 15].reshape(8, 15)
    assert all(sorted(epoch) == list(range(15)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 8
    assert all(np.array_equal(batch, examples.batch(0, step, 4)) for step, batch in enumerate(batches))
    assert not np.array_equal(examples.batch(1, 0, 4), batches[0])


def test_span_reader_starts_on_a_copy_of_the_masked_readers_encoder(tiny_model) -> None:
    reader = start_reader(tiny_model, seed=0)
    encoder = tiny_model.reader.bert.bert
    assert all(torch.equal(v, encoder.state_dict()[k]) for k, v in reader.encoder.state_dict().items())
    assert {p.data_ptr() for p in reader.parameters()}.isdisjoint(p.data_ptr() for p in encoder.parameters())
    one = start_reader(tiny_model, seed=0).ends.weight
    assert torch.equal(one, reader.ends.weight)
    assert not torch.equal(start_reader(tiny_model, seed=1).ends.weight, reader.ends.weight)


def test_reader_marks_pieces_that_continue_a_word_unless_whole_words_is_false(tiny_model, tmp_path) -> None:
    """Also the reader of a start model, whichever answers it gave before."""
    tiny_model.tokenizer.save(tmp_path)
    pieces = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    expected = {number for piece, number in pieces.items() if piece[:2] == "##"}
    assert expected
    for whole_words in (True, False, True):
        config = FinetuneConfig(whole_words=whole_words)
        reader = finetune._reader_to_train(tiny_model, config, "start")
        assert set(reader.continues_V.nonzero()[:, 0].tolist()) == (expected if whole_words else set())


# -- which passages teach


def gradients(reader: SpanReader) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in reader.named_parameters() if p.grad is not None}


class Draws:
    """A generator whose next numbers are known."""

    def __init__(self, drawn_R: np.ndarray):
        self.random = lambda count, dtype: drawn_R.astype(dtype)


@pytest.mark.parametrize("finds_none", [False, True])
def test_sampled_gradient_of_the_reader_is_in_expectation_that_of_all_passages(
    tiny_model, examples, monkeypatch, finds_none
) -> None:
    """Each row's gradient over the chance that it is drawn; the loss and the retrieval scores' gradient are exact."""
    torch.manual_seed(0)
    reader = start_reader(tiny_model, seed=0, finds_none=finds_none).eval()
    for layer in (reader.ends, reader.score):
        torch.nn.init.normal_(layer.weight, std=0.5)
    rows = examples.rows(reader, np.array([0, 5, 14]), np.array([[0, 1, 20], [10, 8, 3], [2, 4, 6]]))
    rows, asked = rows.that_teach(reader)
    count = len(rows.body_RT)

    def step(gradient: str, drawn_R: np.ndarray) -> dict[str, torch.Tensor]:
        score_BN = torch.tensor([[3.0, 1, 2], [0, 0, 2], [1, 2, 3]]).requires_grad_()
        span = span_losses.read(reader, rows, sampled=gradient == "sampled")
        loss = any_correct_loss(*joint_scores(reader, span, rows, score_BN[asked]))
        more = torch.zeros(())
        if gradient == "sampled":
            more, again = span_losses.sampled_reader_loss(reader, rows, span, loss, Draws(drawn_R))
            assert again == max(1, (drawn_R < chance_R.numpy()).sum())
        reader.zero_grad()
        (loss + more).backward()
        assert score_BN.grad is not None
        return gradients(reader) | {"loss": (loss + more).detach(), "scores": score_BN.grad}

    with (
        torch.no_grad()
    ):  # what has to change hands in each row: |p - p given that it is right|, span by span
        scores = torch.tensor([[3.0, 1, 2], [0, 0, 2], [1, 2, 3]])[asked]
        logit, correct = joint_scores(reader, reader(rows.tokens, rows.body_RT), rows, scores)
        moved = logit.softmax(1) - logit.masked_fill(~correct, -torch.inf).softmax(1)
        spans = moved[:, : rows.correct_RWT[0].numel() * 3]
        chance_R = (spans.abs().view(count, -1).sum(1) / span_losses.SURE).clamp(max=1)
    assert (chance_R < 1).sum() >= 2
    whole, never = step("all", np.ones(count)), np.full(count, 1 - 1e-6)
    certain = step("sampled", never)
    mean = dict(certain)
    for row in range(count):
        one = never.copy()
        one[row] = 0.0
        if chance_R[row] < 1:
            alone = step("sampled", one)
            mean |= {name: mean[name] + chance_R[row] * (alone[name] - certain[name]) for name in mean}
    for name, value in whole.items():
        assert torch.allclose(mean[name], value, rtol=1e-3, atol=1e-5 + 1e-4 * value.abs().max().item()), name


def test_questions_whose_passages_hold_no_answer_are_not_read(tiny_kb, tiny_model, examples) -> None:
    reader = start_reader(tiny_model, seed=0).eval()
    texts = [passage.text for passage in tiny_kb]
    empty = [n for n, text in enumerate(texts) if RIVERS[0] not in text][:2]
    holding = next(n for n, text in enumerate(texts) if RIVERS[1] in text)
    rows = examples.rows(reader, np.array([0, 1]), np.array([empty, [empty[0], holding]]))
    teach, asked = rows.that_teach(reader)
    assert asked.tolist() == [1] and teach.questions == 1 and len(teach.body_RT) == 2
    length = teach.tokens.ids_BT.shape[1]
    assert torch.equal(teach.tokens.ids_BT, rows.tokens.ids_BT[2:, :length])
    assert torch.equal(teach.correct_RWT, rows.correct_RWT[2:, :, :length])
    none = examples.rows(reader, np.array([0]), np.array([empty]))
    teach, asked = none.that_teach(reader)
    assert asked.tolist() == [0] and len(teach.body_RT) == 2  # nothing teaches: the loss is 0 all the same
    span = span_losses.read(reader, teach, sampled=True)
    loss = any_correct_loss(*joint_scores(reader, span, teach, torch.zeros(1, 2)))
    more, _ = span_losses.sampled_reader_loss(reader, teach, span, loss, generator(0))
    (loss + more).backward()
    assert (loss + more).item() == 0 and not any(value.any() for value in gradients(reader).values())
    finds_none = start_reader(tiny_model, seed=0, finds_none=True)
    assert len(rows.that_teach(finds_none)[1]) == 2


def test_reader_and_losses_read_nothing_back_from_a_gpu(tiny_model, examples, monkeypatch) -> None:
    """With meta tensors, which have no values: reading one is an error. Layers are computed as on a GPU."""
    monkeypatch.setattr(states, "_way", lambda bert, tokens: "flash")
    reader, meta = start_reader(tiny_model, seed=0).to("meta"), torch.device("meta")
    rows = examples.rows(reader, np.array([0, 5, 14]), np.array([[0, 1, 20], [10, 8, 3], [2, 4, 6]]))
    rows, asked = rows.that_teach(reader)
    rows, score_BN = rows.to(meta), torch.zeros(len(asked), 3, device=meta)
    span_RWT = span_losses.read(reader, rows, sampled=False)
    for span_loss, hard in (("marginal", False), ("first", False), ("hard-em", True)):
        logit_BX, correct_BX = joint_scores(reader, span_RWT, rows, score_BN)
        counted_BX = counted(logit_BX, correct_BX, span_RWT, span_loss, hard)
        loss = own_share(logit_BX, counted_BX) * any_correct_loss(logit_BX, counted_BX)
        loss.backward(retain_graph=True)
        assert loss.device == meta


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_what_trains_and_what_is_asked_on_dev_questions_is_what_an_answer_reads(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch, method
) -> None:
    """A step reads, of each question, the passages that `realm answer --method` reads, in their order."""
    read, judged = [], []
    rows, looked = Examples.rows, finetune.ask

    def note(examples: Examples, reader: SpanReader, batch: np.ndarray, number_BK: np.ndarray):
        read.append((batch, number_BK))
        return rows(examples, reader, batch, number_BK)

    monkeypatch.setattr(Examples, "rows", note)
    monkeypatch.setattr(finetune, "ask", lambda *asked: judged.append(asked[0].method) or looked(*asked))
    asked = [*TRAIN[:3], Question("x", "xyzzy?", ("Ouse",))]  # no passage has a word of the last one
    config = settings(f"method={method}", "steps=1", "batch_size=4", "read=3", "retrieved=28", "dropout=0")
    out = finetune.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder), asked, DEV)
    assert set(judged) == {method}
    answerer = Answerer.load(str(tiny_kb.folder), str(tiny_model_folder), AnswerConfig(device="cpu"))
    assert load_model(out).calibration == Calibration(method=method)
    ((batch, number_BK),) = read
    _, expected_BK = answerer.retrieve([asked[n].question for n in batch], 3, method)
    assert number_BK.tolist() == expected_BK.tolist()
    assert (number_BK == NULL_PASSAGE).all(axis=1).tolist() == [method == "bm25" and n == 3 for n in batch]
    logged = [row for row in metrics(out) if row["loss"] is not None]
    assert all(math.isfinite(row["loss"]) for row in logged)


def test_passages_that_a_method_does_not_find_add_nothing_to_a_loss(tiny_model, examples) -> None:
    reader = start_reader(tiny_model, seed=0, finds_none=True).eval()
    score = torch.tensor([[1.0, 2.0, finetune.NOT_THERE]])
    whole = both_of(examples, reader, np.array([0]), np.array([[0, 1, NULL_PASSAGE]]), score)
    alone = both_of(examples, reader, np.array([0]), np.array([[0, 1]]), score[:, :2])
    assert any_correct_loss(*whole).item() == pytest.approx(any_correct_loss(*alone).item(), rel=1e-6)
    (none, right), nothing = (
        both_of(examples, reader, np.array([0]), np.array([[NULL_PASSAGE]]), score[:, 2:]),
        examples.holds(np.array([0]), np.array([[NULL_PASSAGE]])),
    )
    assert none.isfinite().sum() == 1 and right.tolist()[0][-1] and not nothing.any()
