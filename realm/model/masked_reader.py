"""Query and passage -> words: the knowledge-augmented encoder of REALM section 3.2.

Axis letters: B rows, T tokens, H hidden, V vocabulary, P predicted positions.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from realm.checksums import check_folder
from realm.errors import DamagedError, at_least, reason
from realm.hub import PACKAGED, encoder_folder
from realm.model.bert import BertConfig, MaskedBert
from realm.model.bert_files import load_bert, save_bert
from realm.model.copying import CopyHead, mixed_target_logp, mixed_vocabulary_logp
from realm.model.modes import chunks, recomputed
from realm.model.states import hidden_states, states_at
from realm.model.tensor_files import load_tensors, save_tensors
from realm.tokens.layouts import Tokens
from realm.tokens.tokenizer import Tokenizer

COPY_HEAD = "copy_head.safetensors"
"""File of the copy head, beside the weights of the encoder."""

ROWS_AT_ONCE = 64
"""Number of rows that the reader computes at a time on a CPU; a larger number only needs more padding and memory."""
GPU_ROWS_AT_ONCE = 512
"""Number of rows that the reader computes at a time on a GPU, which would wait for the CPU if it had fewer rows to compute."""


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of an encoder with random weights."""

    layers: int = 4
    """Number of transformer layers."""
    hidden: int = 256
    """Width of the states; the feed-forward part is four times as wide."""
    heads: int = 4
    """Number of attention heads; must divide `hidden`."""
    positions: int = 512
    """Length of the longest input in wordpieces."""

    def __post_init__(self) -> None:
        at_least(self, layers=1, hidden=1, heads=1, positions=1)
        if self.hidden % self.heads:
            raise ValueError(f"heads is {self.heads}: it must divide hidden, which is {self.hidden}")


class MaskedReader(nn.Module):
    """p(y|z,x): a BERT with a masked-LM head, which is computed only at masked positions, and optionally a copy head."""

    cached_rows: int = 0
    """Number of rows whose activations are kept at a time (`realm.model.modes.cache_rows`); 0: all rows."""
    sharded: bool = False
    """Whether the weights are sharded (`realm.train.sharding`)."""

    def __init__(self, bert: MaskedBert, copy: bool = False):
        super().__init__()
        self.bert = bert
        self.copy_head = CopyHead(bert.config.hidden_size, bert.config.vocab_size) if copy else None

    @property
    def config(self) -> BertConfig:
        return self.bert.config

    def forward(self, tokens: Tokens, row_P: Tensor, position_P: Tensor) -> Tensor:
        """log p(word) of all words of the vocabulary at the given (row, position) pairs only -> [P, V]."""
        logits_PV, copied = self._read(tokens, row_P, position_P)
        word_logp_PV = logits_PV.log_softmax(dim=-1)
        if copied is None:
            return word_logp_PV
        return mixed_vocabulary_logp(word_logp_PV, *copied, tokens.ids_BT[row_P])

    def target_logp(self, tokens: Tokens, row_P: Tensor, position_P: Tensor, target_P: Tensor) -> Tensor:
        """log p(target) at the given (row, position) pairs -> [P]."""
        if not (self.cached_rows and torch.is_grad_enabled()):
            return self._target_logp(tokens, row_P, position_P, target_P)
        logp_P = torch.zeros(len(row_P), device=row_P.device)
        known_P = row_P.cpu()
        for computed, used in chunks(torch.arange(len(tokens.ids_BT)), self.cached_rows, self.sharded):
            of_P = torch.isin(known_P, used).nonzero().squeeze(1).to(row_P.device, non_blocking=True)
            if len(of_P) or self.sharded:
                part = tokens.rows(computed), row_P[of_P] - int(computed[0]), position_P[of_P], target_P[of_P]
                logp_P = logp_P.index_put((of_P,), recomputed(self._target_logp, *part))
        return logp_P

    def _target_logp(self, tokens: Tokens, row_P: Tensor, position_P: Tensor, target_P: Tensor) -> Tensor:
        logits_PV, copied = self._read(tokens, row_P, position_P)
        word_logp_P = -F.cross_entropy(logits_PV, target_P, reduction="none")
        if copied is None:
            return word_logp_P
        return mixed_target_logp(word_logp_P, *copied, tokens.ids_BT[row_P], target_P)

    def _read(
        self, tokens: Tokens, row_P: Tensor, position_P: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Logits of words [P, V] float32, and the output of the copy head; None if there is no copy head."""
        if self.copy_head is None:
            return self.bert.cls(states_at(self.bert.bert, tokens, row_P, position_P)).float(), None
        states_BTH = hidden_states(self.bert.bert, tokens)
        words_BTH = self.bert.bert.embeddings.word_embeddings(tokens.ids_BT)
        copied = self.copy_head(states_BTH, words_BTH, tokens, row_P, position_P)
        return self.bert.cls(states_BTH[row_P, position_P]).float(), copied

    def token_logp(self, joint: Tokens, position_BM: Tensor, target_BM: Tensor, mask_BM: Tensor) -> Tensor:
        """log p(y_m|z_k,x) of every masked token beside every candidate -> [B, K, M]; 0 where `mask_BM` is 0.

        Each row of `joint` is a query with one of its candidates; the rows of the first query come first. Rows are computed in
        chunks of similar length.
        """
        (queries, most), rows = position_BM.shape, len(joint.ids_BT)
        candidates = rows // queries
        logp_RM = torch.zeros(rows, most, device=joint.ids_BT.device)
        # To count the masked tokens on a GPU, the CPU would have to wait. There, all columns are computed instead.
        shown_BM = mask_BM if mask_BM.device.type == "cpu" else torch.ones(mask_BM.shape)
        by_length = joint.length_B.argsort(descending=True)
        at_once = ROWS_AT_ONCE
        if logp_RM.device.type != "cpu":
            at_once = min(GPU_ROWS_AT_ONCE, self.cached_rows or GPU_ROWS_AT_ONCE)
        for computed, used in chunks(by_length, at_once, self.sharded):
            local_P, masked_P = shown_BM[used // candidates].nonzero(as_tuple=True)
            row_P, query_P, local_P, masked_P = (
                part.to(mask_BM.device, non_blocking=True)
                for part in (used[local_P], used[local_P] // candidates, local_P, masked_P)
            )
            value_P = self.target_logp(
                joint.rows(computed), local_P, position_BM[query_P, masked_P], target_BM[query_P, masked_P]
            )
            logp_RM = logp_RM.index_put((row_P, masked_P), value_P)
        return logp_RM.masked_fill(mask_BM.repeat_interleave(candidates, dim=0) == 0, 0.0).view(
            queries, candidates, most
        )

    def vocabulary_logp(self, joint: Tokens, position_BM: Tensor, mask_BM: Tensor) -> Tensor:
        """log p(word|z_k,x) at every masked token beside every candidate -> [P, K, V].

        The masked tokens have the order of the ones in `mask_BM`. This method is for looking at predictions; training uses
        `token_logp`.
        """
        candidates = len(joint.ids_BT) // len(position_BM)
        query_P, masked_P = mask_BM.nonzero(as_tuple=True)
        row_PK = query_P[:, None] * candidates + torch.arange(candidates, device=query_P.device)
        position_PK = position_BM[query_P, masked_P][:, None].expand_as(row_PK)
        return self(joint, row_PK.flatten(), position_PK.flatten()).view(*row_PK.shape, -1)


def load_reader(name: str, alone: bool = True) -> MaskedReader:
    """Loads a BERT as a masked-LM reader; `name` is a folder, `package:NAME` or a name on the hub.

    See `load_bert` for a BERT without a masked-LM head. With `alone`, the files are compared with the checksums in the folder;
    the encoder in a model folder is loaded without `alone`, because the manifest of the model has checksums of these files.

    Raises:
        InputError: there is no such encoder, the encoder is not of the BERT family, or its files do not load as a BERT.
        DamagedError: a file differs from its checksum, or the copy head is damaged.
    """
    folder = Path(encoder_folder(name))
    if alone and name not in PACKAGED:  # `encoder_folder` checks packaged encoders
        check_folder(folder)
    reader = MaskedReader(load_bert(folder, name), copy=(folder / COPY_HEAD).is_file())
    if reader.copy_head is not None:
        try:
            reader.copy_head.load_state_dict(load_tensors(folder / COPY_HEAD))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise DamagedError(
                f"{folder / COPY_HEAD} is damaged, or was written by another version of realm: {reason(error)}"
            ) from error
    return reader


def save_reader(reader: MaskedReader, folder: Path, compact: bool = False) -> None:
    """Writes a reader in the layout of transformers, and the copy head as a separate file; see `save_bert` for `compact`."""
    save_bert(reader.bert, folder, compact)
    if reader.copy_head is not None:
        save_tensors(reader.copy_head.state_dict(), folder / COPY_HEAD, compact=compact)


def new_reader(encoder: EncoderConfig, tokenizer: Tokenizer) -> MaskedReader:
    """A reader with random weights, for text that no pre-trained encoder fits."""
    return MaskedReader(
        MaskedBert(
            BertConfig(
                vocab_size=tokenizer.vocab_size,
                hidden_size=encoder.hidden,
                num_hidden_layers=encoder.layers,
                num_attention_heads=encoder.heads,
                intermediate_size=4 * encoder.hidden,
                max_position_embeddings=encoder.positions,
                pad_token_id=tokenizer.pad_id,
            )
        )
    )
