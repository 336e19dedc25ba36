"""Flax NNX models: BERT and its heads."""

from models.bert import Bert
from models.config import SIZES, BertConfig
from models.pretraining import BertForPreTraining, PreTrainingBatch, pretraining_losses

__all__ = [
    "SIZES",
    "Bert",
    "BertConfig",
    "BertForPreTraining",
    "PreTrainingBatch",
    "pretraining_losses",
]
