"""Calls training stages from Python: masked-LM training, REALM pre-training, and a measurement of the result.

    python examples/stages.py manual models

`manual` is a workspace. Training uses the knowledge base of the workspace, and starts from its model. If the program is
interrupted, run it again: it continues.
"""

import sys
from pathlib import Path

from realm.qa.probe import ProbeConfig, probe
from realm.store.knowledge_base import KnowledgeBase
from realm.train import mlm, pretrain


def main(workspace: str, models: str, steps: int = 100) -> None:
    """Makes MODELS/encoder and MODELS/realm, and prints the recall of MODELS/realm on held-out masked facts."""
    kb = KnowledgeBase.open(Path(workspace, "kb"))
    start, encoder, realm_model = f"{workspace}/model", Path(models, "encoder"), Path(models, "realm")
    query_tokens = 32
    reading = mlm.MlmConfig(
        init=start, steps=steps, query_tokens=query_tokens, embedder_start="given", device="cpu"
    )
    if not encoder.exists():
        mlm.train(kb, encoder, reading)
    config = pretrain.PretrainConfig(steps=steps, batch_size=4, candidates=4, device="cpu")
    if not realm_model.exists():
        pretrain.train(kb, realm_model, config, str(encoder))
    found = probe(kb, str(realm_model), ProbeConfig(read=16, device="cpu"))
    print(f"{found.n} held-out masked facts, found in the first 5 passages: {found.recall[5]:.1f} %")


if __name__ == "__main__":
    main(*sys.argv[1:])
