"""The reference's side: transformers 4.57.6 builds tiny REALM checkpoints, runs them, and judges what we write.

Runs in an environment of its own (`reference_environment.py`), and knows nothing of this package:

    python reference.py build FOLDER              checkpoints of all types and both key sets, and the numbers they give
    python reference.py judge FOLDER EXPORTED     loads what we exported; prints as JSON what differs from the originals

Letters: B rows, n candidates per query, T tokens, N blocks, R blocks read.
"""

import copy
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

os.environ["TRUST_REMOTE_CODE"] = "True"  # it guards the records behind this; the ones here are our own
from transformers import (
    AutoTokenizer,
    RealmConfig,
    RealmEmbedder,
    RealmForOpenQA,
    RealmKnowledgeAugEncoder,
    RealmReader,
    RealmRetriever,
    RealmScorer,
    RealmTokenizerFast,
)

WORDS = (
    "the of and in was is a to by for on who what where which when river town king queen built wrote born died "
    "paris london rome vienna berlin alan turing ada lovelace mary shelley bach mozart 1903 1912 1850 1685 "
    "computer science engine novel music bridge tower first second great small old new north south"
).split()
CONFIG = RealmConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
    retriever_proj_size=8,
    num_candidates=3,
    span_hidden_size=12,
    max_span_width=4,
    reader_beam_size=3,
    reader_seq_len=32,
    searcher_beam_size=8,
    num_block_records=40,
    hidden_dropout_prob=0.0,  # so that training mode has numbers to compare
    attention_probs_dropout_prob=0.0,
)
QUESTIONS = [
    "who wrote the first novel",
    "Where was Alan Turing born?",
    "what is the river of Vienna",
    "who built the \u2603 bridge in 1903",  # a word that the vocabulary lacks: the reference loses it
    "which old king and which new queen of the great town in the north was born in the small tower on the river",
]
ANSWERS = [["it is in", "london"], ["Wrote"], ["the", "river"], ["\u00c9ngine", "in"], ["a new bridge tower"]]


def vocabulary() -> list[str]:
    letters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    return [
        "[PAD]",
        "[unused0]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{c}" for c in letters if c.isalnum()),
        *(word for word in WORDS if len(word) > 1),
    ]


def blocks(count: int) -> list[bytes]:
    """Sentences of known words; a few odd ones: accents, unknown signs, a spelled [SEP], one long, one empty."""
    draw = np.random.default_rng(0)
    texts = []
    for number in range(count):
        words = draw.choice(WORDS, size=draw.integers(6, 22)).tolist()
        texts.append(f"{' '.join(words).capitalize()}. It is {'of' if number % 2 else 'in'} {words[0]}.")
    texts[3] = "Ada Lovelace, née Byron, wrote of the \u2603 engine."
    texts[5] = "The [SEP] is a sign of the old computer science."
    texts[7] = " ".join(draw.choice(WORDS, size=60))
    texts[11] = texts[12]
    texts[20] = ""
    texts[31] = ""
    return [text.encode() for text in texts]


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that scores differ clearly; norms and biases too, so that none can be mixed up."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = name.endswith("weight") and ("Norm" in name or "normalization" in name)
            parameter.copy_(1 + 0.2 * noise if is_gain else 0.35 * noise)


def seeded(cls: type, seed: int, **more) -> torch.nn.Module:
    model = cls(CONFIG, **more)
    randomise(model, seed)
    model.tie_weights()
    return model.eval()


def save_new(model: torch.nn.Module, folder: Path) -> None:
    """As 4.57.6 writes them; safetensors besides where it can."""
    model.save_pretrained(folder / "new", safe_serialization=False)
    try:
        model.save_pretrained(folder / "safetensors")
    except RuntimeError:  # shared tensors: 3 of the 5 types
        for file in (folder / "safetensors").glob("*"):
            file.unlink()
        (folder / "safetensors").rmdir()


def save_old(model: torch.nn.Module, folder: Path) -> None:
    """The key set of the published files: position_ids for each core."""
    (folder / "old").mkdir(parents=True)
    model.config.save_pretrained(folder / "old")
    states = dict(model.state_dict())
    for name in [n for n in states if n.endswith("embeddings.word_embeddings.weight")]:
        core = name.removesuffix("word_embeddings.weight")
        states[f"{core}position_ids"] = torch.arange(CONFIG.max_position_embeddings)[None]
    torch.save(states, folder / "old" / "pytorch_model.bin")


def gradients(model: torch.nn.Module, loss: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {f"{name}/grad/{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def tokens(rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random ids with padding at the end and a second segment."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, len(vocabulary()), (rows, length), generator=draw)
    real = torch.randint(length // 2, length + 1, (rows, 1), generator=draw)
    mask = (torch.arange(length)[None] < real).long()
    segments = (torch.arange(length)[None] >= length // 3).long() * mask
    ids[:, 0] = 3
    return ids * mask, mask, segments


def run_embedder(model: RealmEmbedder) -> dict[str, torch.Tensor]:
    ids, mask, segments = tokens(4, 14, 1)
    vector = model(ids, attention_mask=mask, token_type_ids=segments).projected_score
    weight = torch.randn(vector.shape, generator=torch.Generator().manual_seed(2))
    out = {"ids": ids, "mask": mask, "segments": segments, "vector": vector, "weight": weight}
    return {f"embedder/{k}": v for k, v in out.items()} | gradients(
        model, (vector * weight).sum(), "embedder"
    )


def run_scorer(model: RealmScorer, name: str) -> dict[str, torch.Tensor]:
    ids, mask, segments = tokens(2, 12, 3)
    other = tokens(6, 15, 4)
    found = model(
        ids,
        attention_mask=mask,
        token_type_ids=segments,
        candidate_input_ids=other[0].view(2, 3, 15),
        candidate_attention_mask=other[1].view(2, 3, 15),
        candidate_token_type_ids=other[2].view(2, 3, 15),
    )
    loss = -found.relevance_score.log_softmax(-1)[:, 1].sum()
    out = {
        "ids": ids,
        "mask": mask,
        "segments": segments,
        "candidate_ids": other[0],
        "candidate_mask": other[1],
        "candidate_segments": other[2],
        "relevance": found.relevance_score,
        "query": found.query_score,
        "candidate": found.candidate_score,
    }
    return {f"{name}/{k}": v for k, v in out.items()} | gradients(model, loss, name)


def run_encoder(model: RealmKnowledgeAugEncoder) -> dict[str, torch.Tensor]:
    ids, mask, segments = tokens(6, 16, 5)
    draw = torch.Generator().manual_seed(6)
    relevance = torch.randn(2, 3, generator=draw).requires_grad_()
    mlm_mask = torch.zeros(2, 16)
    mlm_mask[0, [2, 3]], mlm_mask[1, [1, 4, 5]] = 1, 1
    labels = torch.randint(6, len(vocabulary()), (2, 16), generator=draw)
    ignored = labels.masked_fill(mlm_mask == 0, -100)

    def run(labels: torch.Tensor, mlm_mask: torch.Tensor | None, relevance: torch.Tensor):
        return model(
            ids.view(2, 3, 16),
            attention_mask=mask.view(2, 3, 16),
            token_type_ids=segments.view(2, 3, 16),
            relevance_score=relevance,
            labels=labels,
            mlm_mask=mlm_mask,
        )

    found = run(labels, mlm_mask, relevance)
    out = {
        "ids": ids,
        "mask": mask,
        "segments": segments,
        "relevance": relevance,
        "labels": labels,
        "mlm_mask": mlm_mask,
        "logits": found.logits,
        "loss": found.loss,
        "loss_of_ignored": run(ignored, mlm_mask, relevance).loss,
        "loss_without_mask": run(ignored, None, relevance).loss,
        "loss_of_nan": run(labels, mlm_mask, torch.full((2, 3), torch.nan)).loss,
        "loss_of_nothing": run(labels, torch.zeros(2, 16), relevance).loss,
    }
    grads = gradients(model, found.loss, "encoder") | {"encoder/relevance_grad": relevance.grad}
    return {f"encoder/{k}": v for k, v in out.items()} | grads


def run_reader(model: RealmReader) -> dict[str, torch.Tensor]:
    ids, mask, segments = tokens(3, 18, 7)
    block_mask = (segments == 1) & (mask == 1)
    draw = torch.Generator().manual_seed(8)
    relevance = torch.randn(8, generator=draw).requires_grad_()
    starts = torch.tensor([[7, -1], [8, 10], [-1, -1], [9, -1]] + [[-1, -1]] * 4)
    ends = torch.tensor([[8, -1], [8, 12], [-1, -1], [15, -1]] + [[-1, -1]] * 4)
    states = model.realm(ids, attention_mask=mask, token_type_ids=segments)[0]
    logits, first, last = model.qa_outputs(states, block_mask)
    found = model(
        ids,
        attention_mask=mask,
        token_type_ids=segments,
        relevance_score=relevance,
        block_mask=block_mask,
        start_positions=starts,
        end_positions=ends,
        has_answers=starts[:, 0] >= 0,
    )
    out = {
        "ids": ids,
        "mask": mask,
        "segments": segments,
        "relevance": relevance,
        "starts": starts,
        "ends": ends,
        "logits": logits,
        "first": first,
        "last": last,
        "retriever_loss": found.retriever_loss,
        "reader_loss": found.reader_loss,
        "chosen": torch.stack([found.block_idx, found.start_pos[0], found.end_pos[0]]),
    }
    grads = gradients(model, found.loss, "reader") | {"reader/relevance_grad": relevance.grad}
    return {f"reader/{k}": v for k, v in out.items()} | grads


def run_openqa(model: RealmForOpenQA, tokenizer) -> tuple[dict[str, torch.Tensor], list[dict]]:
    tensors, told = {}, []
    for number, (question, answers) in enumerate(zip(QUESTIONS, ANSWERS, strict=True)):
        inputs = tokenizer([question], return_tensors="pt")
        vector = model.embedder(**inputs).projected_score[0]
        scores, ids = (model.block_emb @ vector).topk(CONFIG.reader_beam_size)
        _, _, _, joint = model.retriever(ids, inputs.input_ids, None, max_length=CONFIG.reader_seq_len)
        found = model(**inputs)
        says = found.reader_output
        one = {
            "question": question,
            "answers": answers,
            "question_ids": inputs.input_ids[0].tolist(),
            "blocks": ids.tolist(),
            "joint_ids": joint.input_ids.tolist(),
            "block_mask": ((joint.special_tokens_mask == 0) & (joint.token_type_ids == 1)).long().tolist(),
            "block": int(says.block_idx),
            "start": int(says.start_pos),
            "end": int(says.end_pos),
            "answer": tokenizer.decode(found.predicted_answer_ids),
        }
        tensors[f"openqa/{number}/vector"], tensors[f"openqa/{number}/scores"] = vector, scores
        model.train()
        answer_ids = tokenizer(
            answers, add_special_tokens=False, return_token_type_ids=False, return_attention_mask=False
        ).input_ids
        _, wide = (model.block_emb @ vector).topk(CONFIG.searcher_beam_size)
        holds, starts, ends, _ = model.retriever(
            wide, inputs.input_ids, answer_ids, max_length=CONFIG.reader_seq_len
        )
        learnt = model(**inputs, answer_ids=answer_ids).reader_output
        grads = gradients(model, learnt.loss, f"openqa/{number}")
        tensors |= {name: value for name, value in grads.items() if number < 2 or "dense" in name}
        tensors[f"openqa/{number}/retriever_loss"] = learnt.retriever_loss
        tensors[f"openqa/{number}/reader_loss"] = learnt.reader_loss
        model.eval()
        told.append(one | {"wide": wide.tolist(), "holds": holds, "starts": starts, "ends": ends})
    return tensors, told


def save_records(records: list[bytes], folder: Path) -> None:
    """As NumPy 2 pickles them, and as NumPy 1 did."""
    array = np.array(records, dtype=object)
    np.save(folder / "new" / "block_records.npy", array)
    import pickle

    with (folder / "old" / "block_records.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|O", "fortran_order": False, "shape": array.shape}
        )
        file.write(
            pickle.dumps(array, protocol=3).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
        )


def build(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary()) + "\n")
    tokenizer = RealmTokenizerFast(vocab_file=str(folder / "vocab.txt"), do_lower_case=True)
    CONFIG.vocab_size = len(vocabulary())
    expected: dict[str, torch.Tensor] = {}
    embedder = seeded(RealmEmbedder, 10)
    scorer = seeded(RealmScorer, 11)
    towers = seeded(RealmScorer, 12, query_embedder=RealmEmbedder(CONFIG))
    encoder = seeded(RealmKnowledgeAugEncoder, 13)
    reader = seeded(RealmReader, 14)
    records = blocks(CONFIG.num_block_records)
    openqa = seeded(RealmForOpenQA, 15)
    exact = copy.deepcopy(openqa.embedder).double()
    with torch.no_grad():
        for number, record in enumerate(records):
            inputs = tokenizer(record.decode(), return_tensors="pt", truncation=True, max_length=60)
            openqa.block_emb[number] = exact(**inputs).projected_score[0]
    openqa.block_emb[12] += 0.05  # same text as block 11, under another title
    for name, model in {
        "embedder": embedder,
        "scorer": scorer,
        "towers": towers,
        "encoder": encoder,
        "reader": reader,
        "openqa": openqa,
    }.items():
        save_new(model, folder / name)
        save_old(model, folder / name)
        for kind in (folder / name).iterdir():
            tokenizer.save_pretrained(kind)
            if kind.name == "old":
                (kind / "tokenizer.json").unlink()  # "usually" there: not in all published folders
    save_records(records, folder / "openqa")
    openqa.retriever = RealmRetriever.from_pretrained(str(folder / "openqa" / "new"))
    for model in (embedder, scorer, towers, encoder, reader, openqa):
        model.double()  # sums in float32 depend on the processor that adds them up
    expected |= run_embedder(embedder)
    expected |= run_scorer(scorer, "scorer") | run_scorer(towers, "towers")
    expected |= run_encoder(encoder)
    expected |= run_reader(reader)
    more, told = run_openqa(openqa, tokenizer)
    expected |= more
    save_file({k: rounded(v).contiguous() for k, v in expected.items()}, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(told, indent=1) + "\n")


def rounded(value: torch.Tensor) -> torch.Tensor:
    """In float32; what the reference masks with, the lowest number of float64, becomes the lowest there."""
    if not value.is_floating_point():
        return value
    least, most = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    return value.detach().clamp(least, most).float()


LOADERS = {
    "embedder": RealmEmbedder,
    "scorer": RealmScorer,
    "towers": RealmScorer,
    "encoder": RealmKnowledgeAugEncoder,
    "reader": RealmReader,
    "openqa": RealmForOpenQA,
}


def judge(original: Path, exported: Path) -> dict:
    """Per exported folder: keys that the reference misses or does not know, tensors and outputs that differ."""
    verdict = {}
    for folder in sorted(path for path in exported.iterdir() if path.is_dir()):
        mine, _ = loaded(original / folder.name / "new", folder.name)
        theirs, info = loaded(folder, folder.name)
        states = theirs.state_dict()
        differ = [name for name, value in mine.state_dict().items() if not torch.equal(value, states[name])]
        texts = ["Alan Turing wrote \u00c9ngine [SEP] \u2603 science.", *QUESTIONS]
        ids = [
            AutoTokenizer.from_pretrained(f)(texts).input_ids
            for f in (original / folder.name / "new", folder)
        ]
        verdict[folder.name] = {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
            "differ": sorted(differ),
            "same_outputs": same(outputs(mine, folder.name), outputs(theirs, folder.name)),
            "same_ids": ids[0] == ids[1],
        }
    return verdict


def loaded(folder: Path, name: str) -> tuple[torch.nn.Module, dict]:
    more = {}
    if name in ("scorer", "towers"):  # or it keeps one tower for both
        more = {"query_embedder": RealmEmbedder(RealmConfig.from_pretrained(folder))}
    model, info = LOADERS[name].from_pretrained(folder, output_loading_info=True, **more)
    if name == "openqa":
        model.retriever = RealmRetriever.from_pretrained(str(folder))
    return model.eval(), info


Outputs = tuple[dict[str, torch.Tensor], list[dict]]


def outputs(model: torch.nn.Module, name: str) -> Outputs:
    """All numbers that a checkpoint gives, and its decisions."""
    match name:
        case "embedder":
            return run_embedder(model), []
        case "scorer" | "towers":
            return run_scorer(model, name), []
        case "encoder":
            return run_encoder(model), []
        case "reader":
            return run_reader(model), []
    return run_openqa(model, model.retriever.tokenizer)


def same(one: Outputs, other: Outputs) -> bool:
    """Decisions exactly; numbers but for the last bit, which depends on where a tensor lies in memory."""
    if one[1] != other[1] or one[0].keys() != other[0].keys():
        return False
    return all(
        torch.allclose(v, other[0][k], rtol=1e-6, atol=1e-6, equal_nan=True) for k, v in one[0].items()
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["build", folder]:
            build(Path(folder))
        case ["judge", original, exported]:
            print(json.dumps(judge(Path(original), Path(exported))))
        case _:
            sys.exit(__doc__)
