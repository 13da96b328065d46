"""T5 closed-book against transformers' own loss and decoding, and as a whole: it learns questions by heart and resumes."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from realm.errors import InputError
from realm.model.modes import set_dropout
from realm.qa.question_files import Question
from realm.qa.scoring.metrics import exact_match
from realm.systems import closed_book
from realm.systems.closed_book import (
    IGNORED,
    ClosedBook,
    Config,
    Example,
    QuestionExamples,
    Wordpieces,
    loss_of,
    padded,
    span_examples,
    train,
)
from realm.systems.system import Ground, load_system, predict, read_system
from realm.tokens.tokenizer import Tokenizer
from tests.conftest import RIVERS, TOWNS
from tests.systems.runs import WEIGHTS, check_resumed

QUESTIONS = [
    Question(str(n), f"on which river lies {town}?", (RIVERS[n % 4],)) for n, town in enumerate(TOWNS[:10])
]
TINY = {
    "layers": 1,
    "width": 32,
    "device": "cpu",
    "precision": "fp32",
    "dropout": 0.0,
    "log_every": 5,
}


@pytest.fixture(scope="module")
def ground(tiny_kb) -> Ground:
    return Ground(tiny_kb, "", QUESTIONS, QUESTIONS)


@pytest.fixture
def words(tiny_kb) -> Wordpieces:
    return Wordpieces(tiny_kb.tokenizer)


@pytest.fixture
def network(ground):
    model, _ = closed_book._start(ground, Config(**TINY))
    return model.network.eval()


def test_answers_with_marks_inside_of_words_can_be_given() -> None:
    answers = (
        "U.S.|1,000|O'Brien|twenty-one|Paris, France|St. Louis|$5 million|March 4, 1921|AC/DC|the Philosopher's Stone|3.5 km|"
        "Liverpool F.C.|Exodus 20:7|2003–04|11 p.m. to 3 a.m."
    ).split("|")
    words = Wordpieces(Tokenizer.train(answers, 200))
    for answer, ids in zip(answers, words.encode(answers), strict=True):
        assert exact_match(words.decode(ids), [answer]), words.decode(ids)


def test_loss_is_the_mean_over_target_tokens(network, words, monkeypatch) -> None:
    monkeypatch.setattr(closed_book, "INPUT_TOKENS", 12)
    monkeypatch.setattr(closed_book, "ANSWER_TOKENS", 5)
    examples = [Example([7, 8, 9], [10, 11]), Example([12], [13]), Example([5] * 80, [6] * 40)]
    batch = padded(examples, words)
    assert batch.input_BT.shape == (3, 12)
    assert batch.target_BM.tolist()[0] == [10, 11, words.end_id, IGNORED, IGNORED]
    assert batch.input_BT[2, -1] == words.end_id
    found = loss_of(network, batch)
    theirs = network(input_ids=batch.input_BT, attention_mask=batch.mask_BT, labels=batch.target_BM).loss
    assert torch.allclose(found, theirs, rtol=1e-5)
    total, count = 0.0, 0
    for row, target in enumerate(batch.target_BM):
        ids = target[target != IGNORED]
        begun = torch.cat([torch.tensor([words.pad_id]), ids[:-1]])
        length = int(batch.mask_BT[row].sum())
        logits = network(
            input_ids=batch.input_BT[row : row + 1, :length], decoder_input_ids=begun[None]
        ).logits[0]
        total += float(F.cross_entropy(logits, ids, reduction="sum").detach())
        count += len(ids)
    assert found.item() == pytest.approx(total / count, rel=1e-4)


def test_decoding_is_greedy_and_the_score_is_the_mean_log_probability(network, words, monkeypatch) -> None:
    monkeypatch.setattr(closed_book, "ANSWER_TOKENS", 6)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3)
    asked = [question.question for question in QUESTIONS[:3]]
    found = ClosedBook(network, words).answer(asked)
    for question, one in zip(asked, found, strict=True):
        ids = torch.tensor([[*words.encode([question])[0], words.end_id]])
        made, logp = [words.pad_id], []
        while len(made) <= 6 and made[-1] != words.end_id:
            logits = network(input_ids=ids, decoder_input_ids=torch.tensor([made])).logits[0, -1]
            made.append(int(logits.argmax()))
            logp.append(float(logits.log_softmax(dim=0).max()))
        assert one.answer == words.decode(made[1:])
        assert one.score == pytest.approx(float(np.mean(logp)), rel=1e-3)
        assert one.passage == -1


def test_a_masked_sentence_with_its_span_put_back_is_text_of_the_corpus(tiny_kb, words) -> None:
    passages = np.flatnonzero(tiny_kb.tokens.span_starts.lengths)
    bodies = [" ".join(map(str, words.encode([passage.text])[0])) for passage in tiny_kb]
    for one in span_examples(tiny_kb, passages, 50, np.random.default_rng(0), words):
        assert one.input.count(words.sentinel_id) == 1
        place = one.input.index(words.sentinel_id)
        whole = [*one.input[:place], *one.target, *one.input[place + 1 :]]
        assert any(" ".join(map(str, whole)) in body for body in bodies)


def test_answers_are_drawn_from_all_answers_and_patterns_become_matches(tiny_kb, words) -> None:
    town = next(iter(tiny_kb)).text.split()[0]
    questions = [
        Question("1", "who?", ("Ouse", "Tarn")),
        Question("2", f"which river flows by {town}?", (r"O\w+e|T\w+n|V\w+a|W\w+r",), regex=True),
        Question("3", "what?", (r"nothing like this \d{9}",), regex=True),
    ]
    examples = QuestionExamples(tiny_kb, questions, words)
    assert len(examples) == 2
    drawn = {tuple(one.target) for one in examples.draw(100, np.random.default_rng(0))}
    assert {tuple(ids) for ids in words.encode(["Ouse", "Tarn"])} <= drawn
    with pytest.raises(InputError, match="no training question has an answer"):
        QuestionExamples(tiny_kb, questions[2:], words)


def test_it_learns_ten_answers_by_heart_and_answers_from_its_folder(ground, tiny_kb, tmp_path) -> None:
    config = Config(
        steps=250, span_steps=10, batch_size=10, learning_rate=5e-3, warmup=10, dev_every=50, **TINY
    )
    out = train(ground, tmp_path / "t5", config)
    assert read_system(out)["stages"][0]["span_steps"] == 10
    system = load_system(out, tiny_kb)
    found = list(predict(system, tiny_kb, QUESTIONS))
    right = sum(
        one.answer.lower() == question.answers[0].lower()
        for one, question in zip(found, QUESTIONS, strict=True)
    )
    assert right >= 9
    assert {one.passage_id for one in found} == {""}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    best = max(line["dev_em"] for line in lines if "dev_em" in line)
    assert best == pytest.approx(10 * right)


def test_the_sentinel_is_read_wherever_the_span_is_in_a_long_sentence(tiny_kb, words, monkeypatch) -> None:
    monkeypatch.setattr(closed_book, "INPUT_TOKENS", 10)
    passages = np.arange(len(tiny_kb))
    for one in span_examples(tiny_kb, passages, 50, np.random.default_rng(0), words):
        (row,) = padded([one], words).input_BT.tolist()
        assert len(row) <= 10 and words.sentinel_id in row


def test_a_probability_of_zero_is_no_dropout_at_all(ground) -> None:
    model, words = closed_book._start(ground, Config(**TINY))
    set_dropout(model.network, 0.0)
    batch = padded([Example([5, 6, 7], [8, 9])], words)
    torch.manual_seed(0)
    loss = closed_book.loss_of(model.network.train(), batch)
    torch.manual_seed(1)
    assert closed_book.loss_of(model.network, batch) == loss


def test_an_interrupted_run_ends_as_an_uninterrupted_one(ground, tmp_path) -> None:
    config = Config(
        steps=12, span_steps=4, batch_size=4, warmup=2, dev_every=6, checkpoint_seconds=0.0, **TINY
    )
    files = (*WEIGHTS, "tokenizer.json")
    check_resumed(
        lambda ground, out: train(ground, out, config), ground, tmp_path, closed_book, "loss_of", 9, files
    )


def test_a_start_that_is_no_checkpoint_is_refused_in_one_line(ground, tmp_path) -> None:
    (tmp_path / "t5").mkdir()
    with pytest.raises(InputError, match="has no config"):
        train(ground, tmp_path / "out", Config(init=str(tmp_path / "t5"), **TINY))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_published_checkpoint_is_a_start(version, ground, tiny_kb, tmp_path) -> None:
    """A checkpoint in the published layout, with random weights and a small vocabulary.

    T5 1.1, as which `t5-*-ssm-nq` are published, has output weights of its own, does not scale the last states before they
    meet these, and has gated layers.
    """
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    words = sorted({word for passage in tiny_kb for word in passage.text.split()})
    pieces = ["<pad>", "</s>", "<unk>", *(f"\u2581{word}" for word in words), "<extra_id_0>"]
    tokenizer = FastTokenizer(
        models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>", "<extra_id_0>"])
    folder = tmp_path / "published"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = T5Config(
        vocab_size=len(pieces),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        feed_forward_proj="relu" if version == "1.0" else "gated-gelu",
        tie_word_embeddings=version == "1.0",
    )
    network = T5ForConditionalGeneration(sizes).eval()
    if version == "1.1":
        network.lm_head.weight = torch.nn.Parameter(torch.randn_like(network.lm_head.weight))
    network.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"tie_word_embeddings": version == "1.0"}))
    model, words = closed_book._start(ground, Config(init=str(folder), **TINY))
    model.save(tmp_path / "untrained")
    loaded = load_system(tmp_path / "untrained", tiny_kb)
    ids, begun = torch.tensor([[3, 4, 5]]), torch.tensor([[0, 6]])
    with torch.no_grad():
        wanted, states = (
            network(input_ids=ids, decoder_input_ids=begun, output_hidden_states=True)[key]
            for key in ("logits", "decoder_hidden_states")
        )
        found = loaded._network(input_ids=ids, decoder_input_ids=begun).logits
    assert torch.equal(found, wanted)
    scale = 16**-0.5 if version == "1.0" else 1.0  # the width is 16
    assert wanted == pytest.approx(scale * states[-1] @ network.lm_head.weight.detach().T, abs=1e-5)
    settings = TINY | {"init": str(folder)}
    out = train(ground, tmp_path / "out", Config(steps=4, span_steps=2, batch_size=2, warmup=1, **settings))
    answers = load_system(out, tiny_kb).answer(["on which river lies Arden?"])
    assert len(answers) == 1
    assert isinstance(answers[0].answer, str)


def test_a_checkpoint_with_the_files_of_googles_older_checkpoints_is_a_start(
    ground, tiny_kb, tmp_path
) -> None:
    """Weights in pytorch_model.bin and a tokenizer of SentencePiece, and no file for fast tokenizers."""
    import sentencepiece
    from transformers import T5Config, T5ForConditionalGeneration

    folder = tmp_path / "t5"
    folder.mkdir()
    (folder / "text.txt").write_text("\n".join(passage.text for passage in tiny_kb))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=120,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    sizes = T5Config(
        vocab_size=220, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    sizes.save_pretrained(folder)
    network = T5ForConditionalGeneration(sizes)
    torch.save(network.state_dict(), folder / "pytorch_model.bin")
    model, words = closed_book._start(ground, Config(init=str(folder), **TINY))
    assert torch.equal(model.network.shared.weight, network.shared.weight)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    text = "Arden lies on the river Tamm."
    assert words.encode([text]) == [pieces.encode(text)] and words.decode(words.encode([text])[0]) == text
    assert (words.pad_id, words.end_id, words.sentinel_id) == (0, 1, 219)  # <extra_id_0> is the last of 100
    settings = TINY | {"init": str(folder)}
    out = train(ground, tmp_path / "out", Config(steps=4, span_steps=2, batch_size=2, warmup=1, **settings))
    assert load_system(out, tiny_kb).answer(["on which river lies Arden?"])[0].answer is not None

    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("unpickled",)

    torch.save({"shared.weight": Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be loaded as a T5 model"):
        closed_book._start(ground, Config(init=str(folder), **TINY))
    (folder / "spiece.model").unlink()
    with pytest.raises(InputError, match=r"has no tokenizer\.json or spiece\.model"):
        closed_book._start(ground, Config(init=str(folder), **TINY))
