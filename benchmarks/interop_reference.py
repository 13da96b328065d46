"""Measures the reference for `interop.py` and `train_step.py`: transformers 4.57.6, in an environment of its own."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from interop_inputs import K, print_result, questions, step_inputs, timed

os.environ["TRUST_REMOTE_CODE"] = "True"  # to load block records that `interop_files.py` wrote
from transformers import (
    AutoTokenizer,
    RealmForOpenQA,
    RealmKnowledgeAugEncoder,
    RealmRetriever,
    RealmScorer,
)


def step(folder: Path, rounds: int, queries: int, full: bool) -> dict[str, Any]:
    """Measures one forward and backward pass of scorer and encoder."""
    scorer = RealmScorer.from_pretrained(folder / "scorer")
    encoder = RealmKnowledgeAugEncoder.from_pretrained(folder / "encoder")
    given = step_inputs(queries, full)
    query, candidate, joint, target = (given[n] for n in ("query", "candidate", "joint", "target"))

    def run(number: int) -> float:
        scorer.train(number > 0)
        encoder.train(number > 0)
        score = scorer(
            query["ids"],
            attention_mask=query["mask"],
            token_type_ids=query["segments"],
            candidate_input_ids=candidate["ids"].view(queries, K, -1),
            candidate_attention_mask=candidate["mask"].view(queries, K, -1),
            candidate_token_type_ids=candidate["segments"].view(queries, K, -1),
        ).relevance_score
        loss = encoder(
            joint["ids"].view(queries, K, -1),
            attention_mask=joint["mask"].view(queries, K, -1),
            token_type_ids=joint["segments"].view(queries, K, -1),
            relevance_score=score,
            labels=target["labels"],
            mlm_mask=target["mask"],
        ).loss
        loss.backward()
        return loss.item()

    return timed(run, rounds)


def answer(folder: Path, rounds: int) -> dict[str, Any]:
    """Measures the answer to one question."""
    retriever = RealmRetriever.from_pretrained(str(folder / "openqa"))
    model = RealmForOpenQA.from_pretrained(folder / "openqa", retriever=retriever).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "openqa")
    asked = questions(rounds + 1)

    @torch.no_grad()
    def run(number: int) -> str:
        found = model(**tokenizer([asked[number]], return_tensors="pt"))
        return tokenizer.decode(found.predicted_answer_ids)

    return timed(run, rounds)


if __name__ == "__main__":
    what, where, threads, repeats = sys.argv[1:5]
    torch.set_num_threads(int(threads))
    place, count = Path(where), int(repeats)
    print_result(
        step(place, count, int(sys.argv[5]), sys.argv[6] == "full")
        if what == "step"
        else answer(place, count)
    )
