"""Published checkpoints become models and knowledge bases: every kind and key set."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from realm import cli
from realm.errors import RealmError
from realm.interop import blocks as published_module
from realm.interop.blocks import convert_checkpoint
from realm.interop.checkpoint import open_checkpoint
from realm.interop.weight_names import Conversion, convert
from realm.model.folder import load_model
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.question_files import Question
from realm.qa.question_sets import ask
from realm.store import vectors
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.tokenizer import Tokenizer
from tests.interop.reference_environment import FIXTURES, block_texts, reference_values
from tests.store.tiny import TinyTagger

KINDS = {
    "embedder": "embedder",
    "scorer": "scorer",
    "towers": "scorer",
    "encoder": "encoder",
    "reader": "reader",
    "openqa": "openqa",
}
TOLD = reference_values()


def converted(folder: Path) -> Conversion:
    return convert(open_checkpoint(str(folder)))


def weights(conversion: Conversion) -> dict[str, torch.Tensor]:
    parts = conversion.model.parts().items()
    return {f"{name}.{key}": value for name, part in parts for key, value in part.state_dict().items()}


@pytest.mark.parametrize("name", KINDS)
def test_both_key_sets_and_safetensors_give_the_same_model(name: str) -> None:
    files = sorted((FIXTURES / name).iterdir())
    assert {"old", "new"} <= {file.name for file in files}
    made = [converted(file) for file in files]
    first = weights(made[0])
    for file, conversion in zip(files, made, strict=True):
        assert open_checkpoint(str(file)).kind == KINDS[name]
        assert conversion.model.tokenizer.vocabulary() == made[0].model.tokenizer.vocabulary()
        assert weights(conversion).keys() == first.keys()
        for key, value in weights(conversion).items():
            assert torch.equal(value, first[key]), key


def test_a_vocabulary_alone_gives_the_tokenizer_that_the_reference_had() -> None:
    """The old folders have no tokenizer.json."""
    old, new = (open_checkpoint(str(FIXTURES / "openqa" / kind)).tokenizer() for kind in ("old", "new"))
    texts = [
        "Alan Turing wrote Éngine \u2603 science.",
        "日本 née\tqueen's 1903",
        *(told["question"] for told in TOLD),
    ]
    assert old.encode(texts) == new.encode(texts)
    assert old.decode(old.encode(texts)[1]) == new.decode(new.encode(texts)[1])


@pytest.mark.parametrize(
    ("name", "dead"),
    [
        ("embedder", {"cls.predictions.decoder.weight", "realm.embeddings.position_ids"}),
        (
            "encoder",
            {"realm.pooler.dense.weight", "realm.pooler.dense.bias", "realm.embeddings.position_ids"},
        ),
    ],
)
def test_dead_weights_are_left_out_and_named(name: str, dead: set[str]) -> None:
    assert set(converted(FIXTURES / name / "old").dead) == dead


def test_parts_of_several_checkpoints_make_one_model(tmp_path: Path) -> None:
    embedder, encoder = (str(FIXTURES / name / "new") for name in ("embedder", "encoder"))
    convert_checkpoint(embedder, tmp_path / "model", encoder=encoder)
    model = load_model(tmp_path / "model")
    tower, reader = converted(Path(embedder)).model.embedder, converted(Path(encoder)).model.reader
    for made, wanted in ((model.embedder, tower), (model.reader, reader)):
        assert all(torch.equal(v, wanted.state_dict()[k]) for k, v in made.state_dict().items())
    assert convert_checkpoint(embedder, tmp_path / "other", encoder=encoder)["notes"] == []


def test_an_open_qa_model_may_have_the_passage_tower_that_made_its_vectors(tmp_path: Path) -> None:
    tower = converted(FIXTURES / "embedder" / "new").model.embedder.query
    convert_checkpoint(
        str(FIXTURES / "openqa" / "new"), tmp_path / "nq", embedder=str(FIXTURES / "embedder" / "new")
    )
    model = load_model(tmp_path / "nq" / "model")
    assert all(torch.equal(v, tower.state_dict()[k]) for k, v in model.embedder.passage.state_dict().items())
    assert not torch.equal(model.embedder.query.projection.weight, tower.projection.weight)
    Answerer.load(str(tmp_path / "nq" / "kb"), str(tmp_path / "nq" / "model"), AnswerConfig(device="cpu"))


def test_an_open_qa_checkpoint_may_become_a_model_alone(nq: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert cli.main(["convert", str(FIXTURES / "openqa" / "old"), str(out), "--model-only"]) == 0
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]
    assert (out / "realm.json").read_bytes() == (nq / "model" / "realm.json").read_bytes()


def test_a_span_head_that_was_never_trained_is_left_out(tmp_path: Path) -> None:
    """The published pre-trained open-QA checkpoint has one: gains of one, biases of zero."""
    folder = shutil.copytree(FIXTURES / "reader" / "new", tmp_path / "reader")
    states = torch.load(folder / "pytorch_model.bin", weights_only=True)
    for name in [n for n in states if n.startswith("qa_outputs.") and n.endswith("bias")]:
        states[name].zero_()
    states["qa_outputs.layer_normalization.weight"].fill_(1)
    torch.save(states, folder / "pytorch_model.bin")
    conversion = converted(folder)
    assert conversion.model.span_reader is None
    assert any("never trained" in note for note in conversion.notes)


# -- a knowledge base of block records


@pytest.fixture(scope="module")
def nq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("nq") / "nq"
    convert_checkpoint(str(FIXTURES / "openqa" / "old"), out)
    return out


def test_blocks_and_vectors_are_the_published_ones(nq: Path) -> None:
    kb, wanted = KnowledgeBase.open(nq / "kb"), block_texts()
    assert kb.texts() == wanted
    assert [passage.document_id for passage in kb] == [str(number) for number in range(40)]
    repeated = [number for number, text in enumerate(wanted) if text in wanted[:number]]
    assert [number for number, title in enumerate(kb.titles) if title] == repeated == [12, 31]
    assert kb.titles[31] == "block 31"
    assert kb.verify() == []
    block_emb = torch.load(FIXTURES / "openqa" / "new" / "pytorch_model.bin", weights_only=True)["block_emb"]
    (folder,) = vectors.folders(kb.folder)
    found = vectors.read(folder, kb.keys_N)
    assert found is not None and found.array.tobytes() == block_emb.numpy().tobytes()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("number", range(len(TOLD)))
def test_answers_in_reference_compat_are_the_references(nq: Path, number: int, mapped: bool) -> None:
    told = TOLD[number]
    config = AnswerConfig(read=3, device="cpu", reference_compat=True, mapped_index=mapped)
    answerer = Answerer.load(str(nq / "kb"), str(nq / "model"), config)
    with torch.no_grad():
        hits = answerer.version.index.search(answerer.embed(answerer.tokenized([told["question"]])), 3)
    assert hits.number_BK[0].tolist() == told["blocks"]
    best = answerer.answer(told["question"]).answers[0]
    assert (best.text, best.passage.rank - 1) == (told["answer"], told["block"])
    assert best.passage.document == str(told["blocks"][told["block"]])


def test_reference_compat_reads_what_the_reference_reads(nq: Path) -> None:
    from realm.qa.reading import reference_question, reference_reading

    model = load_model(nq / "model")
    for told in TOLD:
        question = reference_question(told["question"], model.tokenizer)
        reading = reference_reading(
            [question] * 3, [block_texts()[n] for n in told["blocks"]], model.tokenizer, 32
        )
        assert reading.tokens.ids_BT.tolist() == told["joint_ids"]
        assert reading.body_BT.long().tolist() == told["block_mask"]


def test_ours_decides_as_the_reference_where_the_reference_is_not_odd(nq: Path) -> None:
    """Questions of known words that are shorter than what is read; the answer is the passage's own text."""
    answerer = Answerer.load(str(nq / "kb"), str(nq / "model"), AnswerConfig(read=3, device="cpu"))
    compared = 0
    for told, found in zip(TOLD, answerer.answer_batch([told["question"] for told in TOLD]), strict=True):
        best = found.answers[0]
        passage = best.passage
        assert passage.text[best.start : best.end] == best.text
        if "\u2603" not in told["question"] and len(told["question_ids"]) < 16:
            assert passage.document == str(told["blocks"][told["block"]])
            assert best.text.lower() == told["answer"]
            compared += 1
    assert compared == 3


def test_a_question_keeps_its_unknown_words_unless_the_reference_way_is_asked_for(nq: Path) -> None:
    from realm.qa.reading import joint_reading, reference_question, reference_reading

    model = load_model(nq / "model")
    (ids,) = model.tokenizer.encode(["who built the \u2603 bridge"])
    assert model.tokenizer.unk_id in ids
    ours = joint_reading([ids], ["the bridge"], model.tokenizer, model.lengths)
    references = reference_reading([ids], ["the bridge"], model.tokenizer, 32)
    assert (
        model.tokenizer.unk_id in ours.tokens.ids_BT
        and model.tokenizer.unk_id not in references.tokens.ids_BT
    )
    assert reference_question("the [SEP]", model.tokenizer)[-1] == model.tokenizer.sep_id
    assert model.tokenizer.sep_id not in model.tokenizer.encode(["the [SEP]"])[0]


def test_a_converted_model_evaluates(nq: Path) -> None:
    answerer = Answerer.load(str(nq / "kb"), str(nq / "model"), AnswerConfig(read=3, device="cpu"))
    questions = [
        Question(str(n), told["question"], (told["answer"],), False) for n, told in enumerate(TOLD[:3])
    ]
    report = ask(answerer, questions).report(questions, answerer.threshold)
    assert report.as_dict()["em"] == 100.0


def test_vectors_in_16_bits_take_half_and_find_the_same(tmp_path: Path) -> None:
    convert_checkpoint(str(FIXTURES / "openqa" / "new"), tmp_path / "nq", bits=16)
    kb = KnowledgeBase.open(tmp_path / "nq" / "kb")
    found = vectors.read(vectors.folders(kb.folder)[0], kb.keys_N)
    assert found is not None and found.array.dtype == np.float16 and found.info.bits == 16
    answerer = Answerer.load(
        str(kb.folder),
        str(tmp_path / "nq" / "model"),
        AnswerConfig(read=3, device="cpu", reference_compat=True),
    )
    assert [answerer.answer(told["question"]).answers[0].text for told in TOLD] == [t["answer"] for t in TOLD]


def test_documents_come_and_go_in_a_converted_knowledge_base(nq: Path, tmp_path: Path) -> None:
    from realm.text.corpus import Document

    kb = KnowledgeBase.open(shutil.copytree(nq / "kb", tmp_path / "kb"))
    kb.add([Document("Bridge", "Ada built the great bridge of Paris.", "mine")], TinyTagger())
    kb.delete(["7", "12"])
    assert len(kb) == 39
    for mapped in (False, True):
        config = AnswerConfig(device="cpu", mapped_index=mapped)
        answerer = Answerer.load(str(kb.folder), str(nq / "model"), config)
        assert len(answerer.version.index) == 39
        assert answerer.answer("who built the bridge").answers
    assert kb.verify() == []


def test_wordpieces_are_made_when_they_are_first_needed(nq: Path) -> None:
    kb = KnowledgeBase.open(nq / "kb")
    assert kb.table.count_rows(filter="body_ids IS NULL") == 40
    wanted = kb.tokenizer.encode(block_texts())
    assert [kb.tokens.body.row(n).tolist() for n in range(40)] == wanted
    assert [kb.tokens_of(np.array([7, 0])).body.row(n).tolist() for n in range(2)] == [wanted[7], wanted[0]]


def test_an_interrupted_conversion_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_module, "BLOCKS_AT_ONCE", 16)
    source, out = str(FIXTURES / "openqa" / "new"), tmp_path / "nq"
    commits = []
    real = published_module.commit_rows

    def commit(*args):
        if len(commits) == 2:
            raise KeyboardInterrupt
        commits.append(args)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(published_module, "commit_rows", commit)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, out)
    assert not (out / "kb").exists()
    rows: list[int] = []
    monkeypatch.setattr(
        published_module,
        "row_batches",
        lambda passages, owners, *more: rows.append(len(owners)) or row_batches(passages, owners, *more),
    )
    from realm.store.schema import row_batches

    report = convert_checkpoint(source, out)
    assert sum(rows) == 8  # 32 of 40 were there
    assert report["passages"] == 40 and KnowledgeBase.open(out / "kb").texts() == block_texts()
    again = convert_checkpoint(source, out)  # nothing is left to do
    assert sum(rows) == 8 and again["version"] == report["version"] == 1


def test_a_changed_checkpoint_is_not_taken_for_the_one_that_was_converted(tmp_path: Path) -> None:
    source, out = shutil.copytree(FIXTURES / "openqa" / "new", tmp_path / "openqa"), tmp_path / "nq"
    convert_checkpoint(str(source), out)
    records = source / "block_records.npy"
    before = records.read_bytes()
    records.write_bytes(before.replace(b"Berlin science", b"London science"))
    with pytest.raises(
        RealmError, match=r"kb has other texts than .*block_records\.npy: give another folder"
    ):
        convert_checkpoint(str(source), out)
    records.write_bytes(before)
    tensors = torch.load(source / "pytorch_model.bin", weights_only=True)
    torch.save(
        tensors | {"reader.qa_outputs.dense_output.bias": torch.full((1,), 5.0)}, source / "pytorch_model.bin"
    )
    with pytest.raises(RealmError, match="exists and is not the model of this conversion"):
        convert_checkpoint(str(source), out)


@pytest.mark.parametrize("bits", [16, 32])
def test_a_repeated_conversion_publishes_vectors_only_if_they_changed(bits: int, tmp_path: Path) -> None:
    source, out = shutil.copytree(FIXTURES / "openqa" / "new", tmp_path / "openqa"), tmp_path / "nq"
    tensors = torch.load(source / "pytorch_model.bin", weights_only=True)
    versions = [convert_checkpoint(str(source), out, bits=bits)["version"] for _ in range(2)]
    torch.save(tensors | {"block_emb": tensors["block_emb"] + 1}, source / "pytorch_model.bin")
    versions += [convert_checkpoint(str(source), out, bits=bits)["version"] for _ in range(2)]
    assert versions == [1, 1, 2, 2]
    kb = KnowledgeBase.open(out / "kb")
    found = vectors.read(vectors.folders(out / "kb")[0], kb.keys_N)
    assert np.allclose(found.array, tensors["block_emb"] + 1, atol=0.01)


def test_a_conversion_continues_when_its_damaged_texts_or_vectors_are_corrected(tmp_path: Path) -> None:
    source, out = shutil.copytree(FIXTURES / "openqa" / "new", tmp_path / "openqa"), tmp_path / "nq"
    records, weights_file = source / "block_records.npy", source / "pytorch_model.bin"
    whole, tensors = records.read_bytes(), torch.load(weights_file, weights_only=True)
    records.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(RealmError, match=r"block_records\.npy is not a pickle of texts"):
        convert_checkpoint(str(source), out)
    records.write_bytes(whole)
    torch.save(tensors | {"block_emb": tensors["block_emb"] * math.nan}, weights_file)
    with pytest.raises(RealmError, match="vector 0 has a NaN"):
        convert_checkpoint(str(source), out)
    torch.save(tensors, weights_file)
    assert convert_checkpoint(str(source), out)["version"] == 1
    assert KnowledgeBase.open(out / "kb").texts() == block_texts()


def test_an_empty_folder_becomes_the_model_and_another_folder_stays(tmp_path: Path) -> None:
    source, out = str(FIXTURES / "embedder" / "new"), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("Mine.")
    with pytest.raises(RealmError, match="out exists and is not the model of this conversion"):
        convert_checkpoint(source, out)
    assert [file.name for file in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    convert_checkpoint(source, out)
    assert load_model(out).stages[-1]["name"] == source


def test_a_model_and_a_knowledge_base_are_not_made_inside_a_model(tmp_path: Path) -> None:
    source = str(FIXTURES / "openqa" / "new")
    convert_checkpoint(source, tmp_path / "nq", model_only=True)
    with pytest.raises(RealmError, match="nq is a model: give another folder"):
        convert_checkpoint(source, tmp_path / "nq")


def test_a_tagger_gives_blocks_the_spans_that_pretraining_hides(tmp_path: Path) -> None:
    convert_checkpoint(str(FIXTURES / "openqa" / "new"), tmp_path / "nq", tagger=TinyTagger())
    kb = KnowledgeBase.open(tmp_path / "nq" / "kb")
    assert kb.config.tagger == "tiny"
    assert (kb.tokens.span_starts.lengths > 0).sum() > 20
    assert len(kb.passages([0])[0].sentences) == 2


def test_blocks_that_were_not_tagged_are_not_taken_for_tagged_ones(nq: Path, tmp_path: Path) -> None:
    kb = shutil.copytree(nq / "kb", tmp_path / "nq" / "kb")
    assert KnowledgeBase.open(kb).config.tagger == ""
    words = ["convert", str(FIXTURES / "openqa" / "old"), str(tmp_path / "nq")]
    with pytest.raises(RealmError, match="is already a knowledge base"):
        cli.run([*words, "--tagger", "rules"])
    cli.run(words)  # the same as before: nothing is left to do
    (tmp_path / "news.jsonl").write_text('{"title": "Bridge", "text": "Ada built it in 1903. It is old."}')
    cli.run(["kb", "add", str(tmp_path / "news.jsonl"), "--kb", str(kb)])
    (added,) = KnowledgeBase.open(kb).passages([40])
    assert len(added.sentences) == 2 and [span.label for span in added.spans] == ["DATE"]


@pytest.mark.parametrize("name", ["scorer", "openqa"])
def test_a_folder_without_a_tokenizer_takes_the_named_one(name: str, tmp_path: Path, capsys) -> None:
    whole, bare = FIXTURES / name / "new", tmp_path / "bare"
    bare.mkdir()
    for file in whole.iterdir():
        if file.name not in (
            "vocab.txt",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
        ):
            shutil.copy(file, bare)
    command = ["convert", str(bare), str(tmp_path / "out")]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert (
        "bare has no tokenizer" in error and "give one with --tokenizer" in error and error.count("\n") == 1
    )
    assert not (tmp_path / "out").exists()
    assert cli.main([*command, "--tokenizer", str(whole)]) == 0
    made = tmp_path / "out" / "model" if name == "openqa" else tmp_path / "out"
    assert Tokenizer.load(made).fingerprint == Tokenizer.load(whole).fingerprint
    (tmp_path / "empty").mkdir()
    assert cli.main([*command[:2], str(tmp_path / "out2"), "--tokenizer", str(tmp_path / "empty")]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_weights_in_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    whole = FIXTURES / "embedder" / "safetensors"
    folder = shutil.copytree(whole, tmp_path / "split")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[start::2]) for start in (0, 1)]
    places = {}
    for number, half in enumerate(halves):
        save_file(half, folder / f"model-{number}.safetensors")
        places |= dict.fromkeys(half, f"model-{number}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    mine, wanted = weights(converted(folder)), weights(converted(whole))
    assert all(torch.equal(value, wanted[key]) for key, value in mine.items())
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    with pytest.raises(RealmError, match=r"lists .* but the folder has no such file"):
        open_checkpoint(str(folder))
