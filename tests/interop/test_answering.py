"""Published checkpoints that answer questions, as span readers: the same numbers as transformers' own class gives."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForQuestionAnswering

from realm import cli
from realm.errors import InputError
from realm.interop.export import check_exportable
from realm.interop.span_readers import LONGEST_ANSWER, load_huggingface_reader, take_reader
from realm.model.calibration import Calibration
from realm.model.folder import Model, load_model
from realm.model.span_reader import SpanConfig
from realm.qa.calibrating import calibrate
from realm.qa.pipeline import SPANS_ADDED_UP, AnswerConfig, Answerer
from realm.qa.question_files import Question
from realm.qa.question_sets import ask
from realm.qa.scoring.metrics import normalise_answer, stands_for
from realm.settings import read_config
from realm.tokens.layouts import reading_inputs
from realm.tokens.tokenizer import Tokenizer
from realm.train import finetune
from realm.train.finetune import FinetuneConfig
from realm.workspace.living import LivingKnowledge
from tests.conftest import RIVERS, TOWNS

QUESTIONS = [
    Question(f"q{n}", f"on which river lies {town}?", (RIVERS[n % 4],)) for n, town in enumerate(TOWNS[:6])
]


@pytest.fixture(scope="module")
def theirs(tiny_kb) -> BertForQuestionAnswering:
    """Of more and wider layers than the tiny model's encoder."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=tiny_kb.tokenizer.vocab_size,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    network = BertForQuestionAnswering(config).eval()
    torch.nn.init.normal_(network.qa_outputs.weight, std=2)  # spans that differ
    return network


@pytest.fixture(scope="module")
def published(theirs, tiny_kb, tmp_path_factory) -> Path:
    """The checkpoint as transformers writes it, with a tokenizer as its first years had it."""
    folder = tmp_path_factory.mktemp("published") / "squad2"
    theirs.save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in tiny_kb.tokenizer.vocabulary()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": True, "model_max_length": 512})
    )
    return folder


@pytest.fixture
def copied(published, tmp_path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "copied"))


def logits(theirs: BertForQuestionAnswering, model: Model, question: str, text: str) -> tuple:
    """The ids of [CLS] question [SEP] text [SEP], where the text begins, and each token's start and end logit less [CLS]'s."""
    asked, read = model.tokenizer.encode([question, text])
    ids = [model.tokenizer.cls_id, *asked, model.tokenizer.sep_id, *read, model.tokenizer.sep_id]
    first = len(asked) + 2
    with torch.no_grad():
        found = theirs(
            torch.tensor([ids]), token_type_ids=torch.tensor([[0] * first + [1] * (len(read) + 1)])
        )
    starts, ends = found.start_logits[0], found.end_logits[0]
    return ids, first, starts - starts[0], ends - ends[0]


def spans_by_hand(theirs: BertForQuestionAnswering, model: Model, question: str, text: str) -> dict:
    """Score of every span of whole words in the text, by its first and last character."""
    ids, first, starts, ends = logits(theirs, model, question, text)
    pieces = model.tokenizer.tokens(ids)
    (encoding,) = model.tokenizer.encode_with_offsets([text])
    return {
        (encoding.starts[start - first], encoding.ends[end - first]): (starts[start] + ends[end]).item()
        for start in range(first, len(ids) - 1)
        for end in range(start, min(start + LONGEST_ANSWER, len(ids) - 1))
        if not pieces[start].startswith("##") and not pieces[end + 1].startswith("##")
    }


def test_scores_are_start_plus_end_logits_less_those_of_cls(theirs, published, tiny_kb, tiny_model) -> None:
    reader, tokenizer, dead = load_huggingface_reader(str(published))
    assert tokenizer.fingerprint == tiny_kb.tokenizer.fingerprint and dead == []
    questions = ["on which river lies Arden?", "who built the tower in Corvo, and for whom?"]
    texts = [passage.text for passage in tiny_kb.passages([0, 9])]
    asked, read = tokenizer.encode(questions), tokenizer.encode(texts)
    tokens = reading_inputs(asked, read, tokenizer, tiny_model.lengths)
    with torch.no_grad():
        score_BWT = reader(tokens, (tokens.segments_BT == 1) & (tokens.ids_BT != tokenizer.sep_id))
    for row, (question, text) in enumerate(zip(questions, texts, strict=True)):
        ids, first, starts, ends = logits(theirs, tiny_model, question, text)
        seen = 0
        for width, start in score_BWT[row].isfinite().nonzero().tolist():
            assert first <= start and start + width < len(ids) - 1
            by_hand = starts[start] + ends[start + width]
            assert score_BWT[row, width, start].item() == pytest.approx(by_hand.item(), abs=1e-4)
            seen += 1
        assert seen == len(spans_by_hand(theirs, tiny_model, question, text))


def test_best_answer_is_that_of_the_highest_sum_of_logits_and_none_has_the_score_0(
    theirs, published, tiny_kb, tiny_model_folder
) -> None:
    answerer = Answerer.load(
        str(tiny_kb.folder), str(tiny_model_folder), AnswerConfig(device="cpu", reader=str(published))
    )
    for number, question in enumerate(QUESTIONS):
        (passage,) = tiny_kb.passages([number])
        by_hand = spans_by_hand(theirs, answerer.model, question.question, passage.text)
        (start, end), score = max(by_hand.items(), key=lambda item: item[1])
        (found,) = answerer.answer_from([question.question], np.array([[number]]))
        best = found.answers[0]
        assert (best.start, best.end) == (start, end)
        assert best.score == pytest.approx(score, abs=1e-3)  # of one passage read, log p(z|x) is 0
        total = 1 + sum(torch.tensor(list(by_hand.values())).exp().tolist())
        same = [
            s
            for (a, b), s in sorted(by_hand.items(), key=lambda item: -item[1])[:SPANS_ADDED_UP]
            if stands_for(normalise_answer(best.text), normalise_answer(passage.text[a:b]))
        ]
        share = sum(torch.tensor(same).exp().tolist()) / total
        assert best.probability == pytest.approx(share, rel=1e-2)


def test_scores_of_several_passages_hold_log_p_of_each_among_them(
    theirs, published, tiny_kb, tiny_model_folder
) -> None:
    config = AnswerConfig(device="cpu", reader=str(published), read=3)
    answerer = Answerer.load(str(tiny_kb.folder), str(tiny_model_folder), config)
    for question in QUESTIONS[:3]:
        answers = answerer.answer(question.question)
        assert len(answers.passages) == 3
        for passage in answers.passages:
            best = max(spans_by_hand(theirs, answerer.model, question.question, passage.text).values())
            expected = best + torch.tensor(passage.probability).log().item()
            assert passage.span is not None and passage.span.score == pytest.approx(expected, abs=1e-3)


# -- files


def same_weights(one: str, other: str) -> bool:
    mine, yours = (load_huggingface_reader(name).reader.state_dict() for name in (one, other))
    return mine.keys() == yours.keys() and all(torch.equal(mine[key], yours[key]) for key in mine)


def test_pickled_weights_of_the_first_years_give_the_same_reader(theirs, published, copied) -> None:
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in theirs.state_dict().items()
    }
    old |= {
        "bert.pooler.dense.bias": torch.zeros(48),
        "bert.embeddings.position_ids": torch.arange(128)[None],
    }
    (copied / "model.safetensors").unlink()
    torch.save(old, copied / "pytorch_model.bin")
    assert same_weights(str(copied), str(published))
    assert load_huggingface_reader(str(copied)).dead == [
        "bert.embeddings.position_ids",
        "bert.pooler.dense.bias",
    ]


class Surprise:
    """What a pickle may hold beside tensors."""

    def __reduce__(self):
        return (print, ("unpickled",))


def test_file_that_holds_more_than_tensors_is_not_read(copied, capsys) -> None:
    (copied / "model.safetensors").unlink()
    torch.save({"qa_outputs.weight": Surprise()}, copied / "pytorch_model.bin")
    with pytest.raises(InputError, match="contains more than tensors"):
        load_huggingface_reader(str(copied))
    assert capsys.readouterr().out == ""


def changed_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def test_what_is_no_such_reader_is_one_line(copied, tiny_model, tiny_model_folder) -> None:
    def refused(match: str, name: str = str(copied)) -> None:
        with pytest.raises(InputError, match=match) as error:
            take_reader(tiny_model, name)
        assert "\n" not in str(error.value)

    refused("no span reader: train one with `realm finetune`", str(tiny_model_folder))
    refused("no question-answering head", str(tiny_model_folder / "encoder"))
    refused("not a model folder", str(copied / "nothing"))
    changed_config(copied, model_type="roberta")
    refused("a 'roberta' model")
    changed_config(copied, model_type="bert", num_hidden_layers=4)
    refused("layer.3.* is missing")
    changed_config(copied, num_hidden_layers=3, hidden_size=32)
    refused(r"the shape \(\d+, 48\), but \(\d+, 32\)")
    changed_config(copied, hidden_size=48)
    tensors = load_file(copied / "model.safetensors")
    save_file(tensors | {"qa_outputs.bias": torch.zeros(2).char()}, copied / "model.safetensors")
    refused("qa_outputs.bias is int8")
    assert tiny_model.span_reader is None


def test_reader_of_another_vocabulary_or_of_too_short_inputs_is_one_line(copied, tiny_model) -> None:
    pieces = (copied / "vocab.txt").read_text().split("\n")
    (copied / "vocab.txt").write_text("\n".join([*pieces[:-2], "elsewhere", ""]))
    with pytest.raises(InputError, match=r"copied has tokenizer \w{16}, but model and .* have \w{16}"):
        take_reader(tiny_model, str(copied))
    (copied / "vocab.txt").write_text("\n".join(pieces))
    reader = BertForQuestionAnswering(
        BertConfig(
            vocab_size=tiny_model.tokenizer.vocab_size,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=8,
            max_position_embeddings=64,
        )
    )
    reader.save_pretrained(copied)
    with pytest.raises(InputError, match=r"reads 64 wordpieces in 2 segments, .* have up to 80"):
        take_reader(tiny_model, str(copied))


# -- uses


def best_answers(answerer: Answerer) -> list[tuple[str, float, float]]:
    found = [answerer.answer(question.question).answers[0] for question in QUESTIONS]
    return [(one.text, round(one.score, 4), round(one.probability, 5)) for one in found]


def test_converted_reader_answers_as_it_does_alone_with_the_index_of_its_retriever(
    published, tiny_kb, tiny_model_folder, tmp_path, capsys
) -> None:
    out = tmp_path / "kept"
    line = ["convert", str(published), str(out), "--retriever", str(tiny_model_folder)]
    assert cli.main([*line, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["kind"] == "reader" and made["model"] == str(out) and "realm calibrate" in made["notes"][0]
    kb = str(tiny_kb.folder)
    kept = Answerer.load(kb, str(out), AnswerConfig(device="cpu"))
    assert kept.model.stages[-1] == {"stage": "reader", "name": str(published)}
    alone = Answerer.load(kb, str(tiny_model_folder), AnswerConfig(device="cpu", reader=str(published)))
    again = Answerer.load(kb, str(tiny_model_folder), AnswerConfig(device="cpu", reader=str(out)))
    assert best_answers(kept) == best_answers(alone) == best_answers(again)
    for more in ("--encoder", "--tokenizer"):
        assert cli.main([*line[:2], str(tmp_path / "new"), *line[3:], more, "x"]) == 2
    assert not (tmp_path / "new").exists()


def test_another_reader_takes_the_calibration_away_and_leaves_the_method(published, tiny_model) -> None:
    tiny_model.calibration = Calibration(slope=0.5, threshold=0.3, method="hybrid")
    take_reader(tiny_model, str(published))
    assert tiny_model.calibration == Calibration(method="hybrid")


def test_classes_of_the_published_checkpoints_do_not_take_its_head(published, tiny_model) -> None:
    take_reader(tiny_model, str(published))
    tiny_model.embedder.config = replace(tiny_model.embedder.config, pooling="cls", norm="layer")
    with pytest.raises(InputError, match="question-answering head, which the published classes do not have"):
        check_exportable(tiny_model)
    reader = finetune.start_reader(tiny_model, 0)
    finetune.set_whole_words(reader, tiny_model, False)
    check_exportable(tiny_model)
    for other in ({"objective": "mixture"}, {"retrieval_score": False}):
        reader.config = replace(SpanConfig(), **other)
        with pytest.raises(InputError, match="add the retrieval score to every span score"):
            check_exportable(tiny_model)


def test_every_command_that_answers_takes_the_reader(
    published, tiny_kb, tiny_model_folder, tmp_path, capsys
) -> None:
    kb, name = str(tiny_kb.folder), str(tiny_model_folder)
    config = AnswerConfig(device="cpu", reader=str(published))
    answerer = Answerer.load(kb, name, config)
    expected = [one[0] for one in best_answers(answerer)]
    living = LivingKnowledge(kb, name, config)
    assert [text for text, *_ in best_answers(living.current.answerer)] == expected
    file = tmp_path / "q.jsonl"
    file.write_text(
        "".join(json.dumps({"question": q.question, "answers": [*q.answers]}) + "\n" for q in QUESTIONS)
    )
    shared = ["--kb", kb, "--model", name, "--reader", str(published), "--set", "device=cpu", "--json"]
    assert cli.main(["answer", QUESTIONS[0].question, *shared]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["text"] == expected[0]
    assert cli.main(["evaluate", "--questions", str(file), *shared]) == 0
    report = ask(answerer, QUESTIONS).report(QUESTIONS, answerer.threshold)
    assert json.loads(capsys.readouterr().out)["em"] == report.as_dict()["em"]
    assert cli.main(["evaluate", "--questions", str(file), "--method", "bm25", *shared[:2], *shared[4:]]) == 2
    with pytest.raises(InputError, match=r"realm convert .* OUT --retriever"):
        calibrate(kb, name, QUESTIONS, "dense", config)


def test_fine_tuning_starts_from_the_reader_and_saves_its_layers(
    published, tiny_kb, tiny_model_folder, tmp_path
) -> None:
    sets = ["device=cpu", "precision=fp32", f"reader='{published}'", "unanswerable=0.2"]
    untrained = read_config(FinetuneConfig, "tiny", "finetune", [*sets, "steps=0"])
    trained = read_config(FinetuneConfig, "tiny", "finetune", [*sets, "steps=2", "dropout=0"])
    before, after = (
        load_model(
            finetune.train(tiny_kb, tmp_path / name, config, str(tiny_model_folder), QUESTIONS, [])
        ).span_reader
        for name, config in (("before", untrained), ("after", trained))
    )
    start = load_huggingface_reader(str(published)).reader
    assert before is not None and after is not None
    assert before.config == after.config == start.config
    assert after.encoder.config.num_hidden_layers == 3
    states = before.state_dict()
    assert all(torch.equal(value, states[key]) for key, value in start.state_dict().items())
    assert not torch.equal(after.ends.weight, before.ends.weight)


def test_tokenizer_of_the_first_years_and_of_today_are_one(published, tiny_kb, tmp_path) -> None:
    tiny_kb.tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == Tokenizer.load(published).fingerprint
