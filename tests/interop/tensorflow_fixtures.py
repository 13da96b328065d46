"""Google's side: TensorFlow writes the reference's checkpoints as Google's are, and the reference's own loader reads them back.

    pip install tensorflow-cpu transformers==4.57.6 torch safetensors        in an environment of its own
    python tests/interop/tensorflow_fixtures.py                            writes fixtures/tensorflow anew

Names, layouts and the optimizer's variables are those of the released files; the values are those of the fixtures beside it.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import tensorflow as tf
import torch
from transformers import RealmConfig, RealmEmbedder, RealmForOpenQA, RealmKnowledgeAugEncoder
from transformers.models.deprecated.realm.modeling_realm import load_tf_weights_in_realm

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"
LEAVES = {
    r"predictions\.bias$": "predictions.output_bias",
    r"(LayerNorm|layer_normalization)\.weight$": r"\1.gamma",
    r"(LayerNorm|layer_normalization)\.bias$": r"\1.beta",
    r"_embeddings\.weight$": "_embeddings",
    r"\.weight$": ".kernel",
}
GOOGLES = {
    "embedder": [
        ("cls.predictions.", "module/module/module/cls/predictions/"),
        ("cls.", "module/module/"),
        ("realm.", "module/module/module/bert/"),
    ],
    "encoder": [("cls.", "cls/"), ("realm.", "bert/")],
    "openqa": [
        ("embedder.cls.predictions.", "module/module/module/module/cls/predictions/"),
        ("embedder.cls.", "module/module/module/"),
        ("embedder.realm.", "module/module/module/module/bert/"),
        ("reader.realm.", "reader/module/bert/"),
        ("reader.cls.", "reader/module/cls/"),
        ("reader.qa_outputs.dense_intermediate.", "reader/dense/"),
        ("reader.qa_outputs.dense_output.", "reader/dense_1/"),
        ("reader.qa_outputs.layer_normalization.", "reader/layer_normalization/"),
    ],
}
LOADERS = {"embedder": RealmEmbedder, "encoder": RealmKnowledgeAugEncoder, "openqa": RealmForOpenQA}
NEVER_THERE = re.compile(r"cls\.predictions\.decoder\.|position_ids$|^block_emb$")


def googles_name(name: str, kind: str) -> str:
    start, google = next(pair for pair in GOOGLES[kind] if name.startswith(pair[0]))
    leaf = name
    for published, googles in LEAVES.items():
        leaf = re.sub(published, googles, leaf)
    return re.sub(r"layer/(\d+)/", r"layer_\1/", google + leaf.removeprefix(start).replace(".", "/"))


def write(kind: str, prefix: Path) -> None:
    states = torch.load(FIXTURES / kind / "new" / "pytorch_model.bin", weights_only=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        values = {"global_step": 300000}
        for name, value in states.items():
            if not NEVER_THERE.search(name):
                google = googles_name(name, kind)
                values[google] = value.t().numpy() if google.endswith("/kernel") else value.numpy()
                if "layer_0/output" in google:
                    values |= {f"{google}/adam_{slot}": values[google] * 0 for slot in "mv"}
        variables = [tf.compat.v1.get_variable(name, initializer=value) for name, value in values.items()]
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver(variables).save(
            session, str(prefix), write_meta_graph=False, write_state=False
        )


def judge(kind: str, prefix: Path) -> None:
    """The reference loads the file into fresh weights: they must be those that were written."""
    model = LOADERS[kind](RealmConfig.from_pretrained(FIXTURES / kind / "new"))
    load_tf_weights_in_realm(model, model.config, str(prefix))
    states = torch.load(FIXTURES / kind / "new" / "pytorch_model.bin", weights_only=True)
    for name, value in model.state_dict().items():
        if not NEVER_THERE.search(name) and not torch.equal(value, states[name]):
            sys.exit(f"{kind}: the reference reads another {name}")


def main() -> None:
    shutil.rmtree(FIXTURES / "tensorflow", ignore_errors=True)
    for kind in GOOGLES:
        folder = FIXTURES / "tensorflow" / kind
        prefix = folder / ("model.ckpt-300000" if kind == "openqa" else "variables/variables")
        assets = folder if kind == "openqa" else folder / "assets"
        assets.mkdir(parents=True)
        prefix.parent.mkdir(exist_ok=True)
        write(kind, prefix)
        judge(kind, prefix)
        shutil.copy(FIXTURES / "vocab.txt", assets)
        (assets / "bert_config.json").write_text(json.dumps({"num_attention_heads": 2}) + "\n")


if __name__ == "__main__":
    main()
