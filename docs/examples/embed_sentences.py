"""Embeds sentences with the weights that `train.pretrain` has left."""

import pathlib
import sys

import numpy as np
from flax import nnx
from tokenizers import BertWordPieceTokenizer

from models import BertForPreTraining, huggingface

folder = pathlib.Path(sys.argv[1])  # runs/pretrain/model
config, params = huggingface.read(folder, "BertForPreTraining")
model = BertForPreTraining(config, rngs=nnx.Rngs(0))
nnx.update(model, params)

sentences = ["A list is a sequence.", "A tuple is a sequence, too.", "It rains."]
tokenizer = BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=True)
tokenizer.enable_padding()
encodings = tokenizer.encode_batch(sentences)
tokens = np.array([encoding.ids for encoding in encodings], np.int32)
used = np.array([encoding.attention_mask for encoding in encodings], np.int32)

hidden = model.bert(tokens, np.zeros_like(tokens), used.sum(axis=1)).hidden
means = (hidden * used[..., None]).sum(axis=1) / used.sum(axis=1, keepdims=True)
unit = means / np.linalg.norm(means, axis=1, keepdims=True)
print(means.shape)
print(np.round(unit @ unit.T, 3))  # cosines
